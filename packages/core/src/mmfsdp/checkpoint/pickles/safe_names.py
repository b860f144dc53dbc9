"""Lists the names that a checkpoint's pickle may mention; they are described, and never imported or called."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.basics.dtypes import DTYPES
from mmfsdp.errors import UnsafePickleError

__all__ = ["check_is_name", "is_dotted_name", "is_safe_name", "shown"]

_STATISTICS = ("min", "max", "current", "mean")
_GROUP_STATE = "ProcessGroupState"

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


def is_dotted_name(text: str) -> bool:
    """Tell whether a text is identifiers joined by dots, all ASCII, and so cannot be taken for anything but a name.

    ``torch.save`` writes protocol 2, where names end with a newline and Python itself takes only ASCII ones.
    """
    return text.isascii() and all(part.isidentifier() for part in text.split("."))


def check_is_name(module: str, qualname: str, file: Path | None = None) -> None:
    """Raise ``UnsafePickleError`` unless a module and a name in it are both dotted names, even if the file is trusted.

    Args:
        module: The module.
        qualname: What is named in it.
        file: Where this was read, if it was.
    """
    wrong = next((text for text in (module, qualname) if not is_dotted_name(text)), None)
    if wrong is None:
        return
    where = "The content to be written" if file is None else file.name
    raise UnsafePickleError(
        f"{where} names {shown(wrong)} as a class, function or module, which is not a name: only ASCII letters, digits "
        "and underscores joined by dots are. No checkpoint does this; it was made to plant code in what is written.",
        file=None if file is None else str(file),
    )


def shown(text: str) -> str:
    """Return a text in quotes for a message: in one line of at most some 200 characters."""
    return ascii(text if len(text) <= 100 else f"{text[:60]}...{text[-30:]}")


def is_safe_name(module: str, qualname: str) -> bool:
    """Tell whether a pickle may mention something without being trusted.

    Args:
        module: Its module, as Python 3 calls it.
        qualname: Its name there; with a dot for what lies within a class.
    """
    if module == "numpy.dtypes":
        return qualname.isascii() and qualname.isidentifier() and qualname.endswith("DType")
    return qualname in _SAFE.get(module, ())
