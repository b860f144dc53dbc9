"""What other libraries call our settings: torch's FSDP and DDP, accelerate, transformers, DeepSpeed, Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SYNONYMS", "Synonym", "advice_for", "bare_name", "synonym_of"]


@dataclass(frozen=True, slots=True)
class Synonym:
    """A name that other libraries use, and what to write instead."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """An example in our words, by the names of `ShardConfig`; empty if no setting does it."""
    note: str = ""
    """A sentence that completes the example, or says what to do instead."""


_BLOCKS = Synonym(
    {"wrap": "LlamaDecoderLayer"}, "By default, wrap='auto' finds the blocks that repeat or that the model declares."
)
_POLICY = Synonym(
    {"wrap": "LlamaDecoderLayer"}, "wrap='auto' is the default. Functions and torch's policies are the argument policy."
)
_PRECISION = Synonym({"precision": "bf16"}, "precision also takes param_dtype, reduce_dtype and more as a mapping.")
_RECOMPUTING = Synonym({"activation_checkpointing": "full"})
_OFFLOAD = Synonym({"cpu_offload": True})
_MESH = Synonym(note="Pass a DeviceMesh, a process group or a pair of groups as the argument mesh.")
_CLIPPING = Synonym(note="Call mmfsdp.clip_grad_norm_(model, 1.0) before optimizer.step().")
_ACCUMULATING = Synonym(note="Run all micro-batches but the last under mmfsdp.no_sync(model).")
_NOT_NEEDED = Synonym(note="No setting is needed: steps may use other parameters each time. Leave it out.")
_STAGE = Synonym({"sharding": "FULL_SHARD"}, "FULL_SHARD is ZeRO stage 3, SHARD_GRAD_OP stage 2, NO_SHARD stage 0.")
_GROUPS = Synonym({"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 8}})
_TENSOR = Synonym({"parallel": "auto"}, "Give the mesh an axis 'tensor': mesh={'shard': -1, 'tensor': 2}.")
_WHOLE_PARAMS = Synonym(
    {"sharding": {"ignored_parameters": ["head.*"]}}, "Parameter objects are the argument ignored_params."
)
_WHOLE_MODULES = Synonym(
    {"sharding": {"ignored_modules": ["head"]}}, "Module objects are the argument ignored_modules."
)

SYNONYMS: Mapping[str, Synonym] = {
    # fully_shard
    "reshard_after_forward": Synonym({"sharding": {"reshard_after_forward": False}}),
    "mp_policy": _PRECISION,
    "offload_policy": _OFFLOAD,
    "shard_placement_fn": Synonym(note="Parameters are always divided along dimension 0. Leave it out."),
    "dp_mesh_dims": Synonym(note="Pass the part of the mesh that shards as the argument mesh, as in mesh['dp']."),
    # FullyShardedDataParallel
    "sharding_strategy": Synonym({"sharding": "SHARD_GRAD_OP"}),
    "auto_wrap_policy": _POLICY,
    "mixed_precision": _PRECISION,
    "backward_prefetch": Synonym({"prefetch": "post"}),
    "forward_prefetch": Synonym({"prefetch": {"forward": 1}}),
    "use_orig_params": Synonym({"sharding": {"use_orig_params": False}}),
    "sync_module_states": Synonym({"init": {"sync_states": True}}),
    "limit_all_gathers": Synonym({"sharding": {"limit_all_gathers": True}}, "They are always limited."),
    "device_id": Synonym({"init": {"device": "cuda"}}, "torch.cuda.set_device() chooses which one."),
    "device_mesh": _MESH,
    "process_group": _MESH,
    "mesh": _MESH,
    "policy": _POLICY,
    "ignored_modules": _WHOLE_MODULES,
    "ignored_states": _WHOLE_PARAMS,
    "ignored_params": _WHOLE_PARAMS,
    "ignored_parameters": _WHOLE_PARAMS,
    "param_init_fn": Synonym({"init": {"param_init_fn": "torch.nn.init:zeros_"}}),
    "state_dict_type": Synonym(note="Choose when you save: mmfsdp.save_checkpoint(..., kind='full')."),
    # DistributedDataParallel
    "find_unused_parameters": _NOT_NEEDED,
    "static_graph": _NOT_NEEDED,
    # accelerate, whose names may begin with fsdp_
    "version": Synonym({"engine": "fsdp2"}),
    "mixed_precision_policy": _PRECISION,
    "transformer_layer_cls_to_wrap": _BLOCKS,
    "transformer_cls_names_to_wrap": _BLOCKS,
    "min_num_params": Synonym({"wrap": {"kind": "size", "min_num_params": 100_000_000}}),
    "offload_params": _OFFLOAD,
    "activation_checkpointing": _RECOMPUTING,
    "activation_checkpointing_offload": Synonym({"activation_checkpointing": {"offload": True}}),
    "cpu_ram_efficient_loading": Synonym(
        note="Build the model under mmfsdp.parameters_on_meta(), then call mmfsdp.load_pretrained()."
    ),
    # transformers
    "bf16": Synonym({"precision": "bf16"}),
    "fp16": Synonym({"precision": "fp16"}, "It needs a gradient scaler."),
    "gradient_checkpointing": _RECOMPUTING,
    "gradient_checkpointing_kwargs": Synonym({"activation_checkpointing": {"mode": "full", "use_reentrant": False}}),
    "torch_compile": Synonym({"compile": True}),
    "torch_compile_backend": Synonym({"compile": {"backend": "inductor"}}),
    "torch_compile_mode": Synonym({"compile": {"mode": "max-autotune-no-cudagraphs"}}),
    "tp_plan": _TENSOR,
    "tp_size": _TENSOR,
    "max_grad_norm": _CLIPPING,
    "gradient_accumulation_steps": _ACCUMULATING,
    # DeepSpeed
    "zero_optimization": _STAGE,
    "zero_stage": _STAGE,
    "stage": _STAGE,
    "offload_param": _OFFLOAD,
    "offload_param_device": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "offload_optimizer_device": _OFFLOAD,
    "zero_hpz_partition_size": Synonym({"sharding": {"reshard_after_forward": 8}}),
    "gradient_clipping": _CLIPPING,
    # Lightning, torchtitan
    "activation_checkpointing_policy": Synonym(
        {"activation_checkpointing": {"mode": "selective", "modules": "LlamaDecoderLayer"}}
    ),
    "gradient_clip_val": _CLIPPING,
    "accumulate_grad_batches": _ACCUMULATING,
    "data_parallel_shard_degree": _GROUPS,
    "tensor_parallel_degree": _TENSOR,
    "parallelize_plan": _TENSOR,
    "data_parallel_replicate_degree": _GROUPS,
}
"""Names of other libraries, without accelerate's ``fsdp_``. Examples are settings that are accepted as they are."""


def bare_name(name: str) -> str:
    """Return a name in lower case, with underscores and without accelerate's ``fsdp_``."""
    return name.lower().replace("-", "_").removeprefix("fsdp_")


def synonym_of(name: str, accepted: Iterable[str] = ()) -> Synonym | None:
    """Return what another library's name means here; None if none uses it.

    Args:
        name: What the user wrote; a misspelt name counts unless it is nearer to one of ``accepted``.
        accepted: The names that are accepted where the user wrote it.
    """
    import difflib  # only when something is wrong

    bare = bare_name(name)
    if bare in SYNONYMS:
        return SYNONYMS[bare]
    near = difflib.get_close_matches(bare, [*accepted, *SYNONYMS], n=1, cutoff=0.85)
    return SYNONYMS.get(near[0]) if near and near[0] not in accepted else None


def advice_for(name: str, accepted: Iterable[str], *, keywords: bool) -> str:
    """Return ``" Write wrap='LlamaDecoderLayer'."`` for another library's name, or an empty string.

    Args:
        name: What the user wrote.
        accepted: The names that are accepted where the user wrote it.
        keywords: Whether settings are written as keyword arguments, not as a mapping.
    """
    found = synonym_of(name, accepted)
    if found is None:
        return ""
    example = ", ".join(f"{key}={value!r}" for key, value in found.settings.items())
    written = example if keywords else repr(dict(found.settings))
    return "".join(f" {part}" for part in (f"Write {written}." if found.settings else "", found.note) if part)
