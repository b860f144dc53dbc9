"""What to write for arguments that FullyShardedDataParallel does not have, but mmfsdp or similar libraries do."""

from __future__ import annotations

from collections.abc import Collection

from mmfsdp.config import ShardConfig
from mmfsdp.config.synonyms import bare_name, synonym_of

__all__ = ["advice_for_argument"]

_POLICY = "auto_wrap_policy={'kind': 'module_class', 'classes': 'LlamaDecoderLayer'}"
_ARGUMENTS = {
    "wrap": _POLICY,
    "policy": _POLICY,
    "transformer_layer_cls_to_wrap": _POLICY,
    "transformer_cls_names_to_wrap": _POLICY,
    "precision": "mixed_precision='bf16'",
    "mp_policy": "mixed_precision='bf16', or a MixedPrecisionPolicy as mixed_precision",
    "mixed_precision_policy": "mixed_precision='bf16', or a MixedPrecisionPolicy as mixed_precision",
    "sharding": "sharding_strategy='FULL_SHARD'",
    "zero_stage": "sharding_strategy='FULL_SHARD'",
    "reshard_after_forward": "sharding_strategy='SHARD_GRAD_OP', which does not reshard, or 'FULL_SHARD', which does",
    "offload_policy": "cpu_offload=True",
    "mesh": "device_mesh with a DeviceMesh",
    "dp_mesh_dims": "device_mesh with the part of the mesh that shards",
    "prefetch": "backward_prefetch='pre'",
    "ignored_params": "ignored_states",
}


_SECTIONS = {
    "precision": "mixed_precision",
    "cpu_offload": "cpu_offload",
    "activation_checkpointing": "activation_checkpointing",
}


def advice_for_argument(name: str, accepted: Collection[str]) -> str:
    """Return ``" Write cpu_offload=True."`` for a name that belongs to another interface, or an empty string.

    Args:
        name: What the user wrote.
        accepted: The names of all arguments.
    """
    bare = bare_name(name)
    if bare in accepted:
        return f" Write {bare}."
    if bare in _ARGUMENTS:
        return f" Write {_ARGUMENTS[bare]}."
    if bare in ShardConfig.model_fields:
        return f" Write it in config, as in config={{{bare!r}: ...}}."
    found = synonym_of(name, accepted)
    if found is None:
        return ""
    if not found.settings:
        return f" {found.note}"
    [(section, value)] = found.settings.items()
    if section in _SECTIONS:
        return f" Write {_SECTIONS[section]}={value!r}."
    return f" Write config={dict(found.settings)!r}."
