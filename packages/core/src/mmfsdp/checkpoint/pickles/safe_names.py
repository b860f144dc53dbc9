"""The names that a checkpoint's pickle may mention; what is mentioned is described, and never imported or called."""

from __future__ import annotations

from mmfsdp.dtypes import DTYPES

__all__ = ["is_safe_attribute", "is_safe_name"]

_STATISTICS = ("min", "max", "current", "mean")
_GROUP_STATE = "ProcessGroupState"

# Protocol 2 spells `Class.attribute` as getattr(Class, 'attribute'). Every message hub of MMEngine holds the methods of
# HistoryBuffer, and every ShardedTensor a class within its class.
_ATTRIBUTES: dict[tuple[str, str], tuple[str, ...]] = {
    ("mmengine.logging.history_buffer", "HistoryBuffer"): _STATISTICS,
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): (_GROUP_STATE,),
}

_SAFE: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"bool", "bytearray", "dict", "float", "int", "list", "object", "range", "slice", "str", "tuple"}
    ),
    "collections": frozenset({"defaultdict", "Counter", "deque"}),
    "copyreg": frozenset({"_reconstructor", "__newobj_ex__"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "uuid": frozenset({"UUID", "SafeUUID"}),
    "argparse": frozenset({"Namespace"}),
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}),
    "torch": frozenset({"Size", "device", "Tensor", *DTYPES}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.remote_device": frozenset({"_remote_device"}),
    "torch.distributed._shard.metadata": frozenset({"ShardMetadata"}),
    "torch.distributed._shard.sharded_tensor.api": frozenset({"ShardedTensor", f"ShardedTensor.{_GROUP_STATE}"}),
    "torch.distributed._shard.sharded_tensor.shard": frozenset({"Shard"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"MEM_FORMAT_ENCODING", "ShardedTensorMetadata", "TensorProperties"}
    ),
    "torch.distributed._shard.sharding_spec.api": frozenset({"EnumerableShardingSpec"}),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": frozenset({"ChunkShardingSpec"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.nn.parameter": frozenset({"Parameter", "Buffer"}),
    "numpy": frozenset({"dtype", "ndarray", "bool", "bool_", "str_", "bytes_", "void", *DTYPES} - {"bfloat16"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy.core.numeric": frozenset({"_frombuffer"}),
    "numpy._core.numeric": frozenset({"_frombuffer"}),
    "addict.addict": frozenset({"Dict"}),
    "mmengine.config.config": frozenset({"Config", "ConfigDict"}),
    "mmengine.config.lazy": frozenset({"LazyAttr", "LazyObject"}),
    "mmengine.logging.history_buffer": frozenset({"HistoryBuffer", *(f"HistoryBuffer.{name}" for name in _STATISTICS)}),
}


def is_safe_name(full_name: str) -> bool:
    """Tell whether a pickle may mention ``'module.name'``."""
    if full_name.startswith("numpy.dtypes.") and full_name.endswith("DType"):
        return full_name.count(".") == 2
    return any(
        full_name.startswith(f"{module}.") and full_name.removeprefix(f"{module}.") in names
        for module, names in _SAFE.items()
    )


def is_safe_attribute(module: str, qualname: str, attribute: object) -> bool:
    """Tell whether a pickle may say ``getattr(module.qualname, attribute)``."""
    return attribute in _ATTRIBUTES.get((module, qualname), ())
