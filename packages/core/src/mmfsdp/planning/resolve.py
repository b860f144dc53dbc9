"""`plan()`: the pure function from a model and a configuration to a `ShardPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch.nn as nn
from torch.nn.parameter import UninitializedParameter

from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.basics.torch_version import untested
from mmfsdp.config import AutoWrap, ShardConfig
from mmfsdp.config.synonyms import advice_for
from mmfsdp.errors import ConfigError, PlanError, closest
from mmfsdp.planning.activation import activation_plan
from mmfsdp.planning.checks import check_dense, check_forward_methods, check_reshard, check_units, check_unsharded
from mmfsdp.planning.compiled import compile_plan, compiled_already
from mmfsdp.planning.distributed_params import check_divided, divided_by, expert_matches
from mmfsdp.planning.division.rules import divide_by_rules
from mmfsdp.planning.fingerprints import fingerprint
from mmfsdp.planning.ignoring import ignored_states
from mmfsdp.planning.mesh import MeshLike, mesh_spec, without_stages
from mmfsdp.planning.optimizing import optimizer_plan
from mmfsdp.planning.plan_records import BufferEntry, Note, ParamEntry, ShardUnit
from mmfsdp.planning.policies.automatic import explain
from mmfsdp.planning.policies.forms import Policy
from mmfsdp.planning.policies.matching import Match, resolve_policy
from mmfsdp.planning.precision.kept_in_float32 import kept_in_float32
from mmfsdp.planning.precision.unit_dtypes import (
    full_precision_classes,
    low_weights_notes,
    override_matches,
    rounded_input_notes,
    unit_precision,
    unit_reshard,
)
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.planning.tied_weights import check_tied
from mmfsdp.planning.units import draft_units, has_forward

if TYPE_CHECKING:
    from mmfsdp.config.written import ShardSettings

__all__ = ["plan"]

Engine = Literal["fsdp2", "fsdp1", "replicate"]

_ARGUMENTS = ("mesh", "policy", "check_fn", "ignored_modules", "ignored_params", "param_init_fn")  # of plan and shard


def plan(
    model: nn.Module,
    config: ShardConfig | Mapping[str, Any] | None = None,
    mesh: MeshLike = None,
    *,
    policy: Policy = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    **settings: Unpack[ShardSettings],
) -> ShardPlan:
    """Decide how to shard ``model``. Pure: not collective, no process group, nothing is changed.

    Args:
        model: A model on any device; ``meta`` is enough.
        config: The settings; a mapping is validated first and not changed.
        mesh: A world size (ranks), a (replicate, shard) pair, the sizes of named axes, a `MeshSpec`, a DeviceMesh, or a
            pair of them, of which the second is of experts. Default: the running world.
        policy: A wrapping policy object or callable, in place of ``config.wrap``; see `resolve_policy`.
        check_fn: ``(module) -> bool``, in place of ``config.activation_checkpointing.check_fn``.
        ignored_modules: Module objects, besides ``config.sharding.ignored_modules``.
        ignored_params: Parameter objects, besides ``config.sharding.ignored_parameters``.
        **settings: Settings of `ShardConfig`, such as ``precision="bf16"``; each overrides the one in ``config``.

    Returns:
        The plan; equal inputs give equal plans.

    Raises:
        ConfigError: A setting is wrong or cannot be honoured by the chosen engine.
        PolicyError: A policy matched nothing that it named, or returned something other than a decision.
        MeshError: The mesh does not fit the strategy.
        FrozenParametersError: ``use_orig_params=False`` with frozen and trained parameters in one unit.
        PlanError: The model cannot be sharded this way.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"plan() needs an nn.Module, got {model!r} (type {type(model).__name__}).")
    check_unsharded(model)
    mesh = without_stages(mesh)
    config = _as_config(config, settings)
    engine, reason = _choose_engine(config)
    spec = mesh_spec(
        mesh, config.sharding if engine != "replicate" else config.sharding.model_copy(update={"strategy": "NO_SHARD"})
    )
    entries = _param_entries(model, config.precision.storage_dtype)
    ignored = ignored_states(model, config.sharding, ignored_modules, ignored_params, whole=True)
    untouched = {id(param) for param in ignored.params}
    divisions = divide_by_rules(model, config.parallel, mesh, spec, untouched)
    check_divided(model, spec, untouched, divisions.axes)
    check_tied(model)
    for param, divided in divisions.params.items():
        entries[param] = entries[param].model_copy(update={"divided": divided})
    notes = [*_engine_notes(config, engine), *ignored.notes, *divisions.notes]

    wanted = config.wrap if policy is None else policy
    full = full_precision_classes(model, config.precision)
    overrides = override_matches(model, config.precision)
    matches = resolve_policy(model, wanted, ignored_modules=ignored.modules, ignored_params=ignored.params, also=full)
    if wanted == "auto" or isinstance(wanted, AutoWrap):
        chosen = [match for match in matches if match.reason.startswith("auto: ")]
        notes.append(explain([(match.fqn, type(match.module).__name__, match.reason) for match in chosen]))
    chosen_dtypes = {*overrides, *(match.fqn for match in matches if "mixed_precision" in match.settings)}
    kept, kept_notes = kept_in_float32(model, config.precision, chosen_dtypes)
    notes += kept_notes
    matches = _with_overrides(model, matches, overrides)
    matches = [*(match for match in kept if match.fqn not in {found.fqn for found in matches}), *matches]
    kept_fqns = {match.fqn for match in kept}
    experts = expert_matches(model, entries, untouched)
    matches = [*matches, *(match for match in experts if match.fqn not in {found.fqn for found in matches})]
    drafts, unit_notes = draft_units(model, matches, ignored=untouched, can_group=engine != "fsdp1")
    notes += unit_notes

    default_reshard = _default_reshard(config)
    units = tuple(
        ShardUnit(
            fqns=draft.fqns,
            class_name=type(draft.modules[0]).__name__,
            matched_by=draft.matches[0].reason,
            params=tuple(entries[param] for param in draft.params),
            reshard_after_forward=unit_reshard(draft.matches[0], default_reshard, replicated=engine == "replicate"),
            precision=unit_precision(
                draft.matches[0] if draft.fqns != ("",) else None, config.precision, full, overrides, kept_fqns
            ),
            forward_methods=tuple(
                name
                for name in config.sharding.forward_methods
                if any(callable(getattr(module, name, None)) for module in draft.modules)
            ),
        )
        for draft in drafts
    )
    check_dense(model, spec, units)
    check_units(units, engine, config)
    check_reshard(units, spec)
    check_forward_methods(config, units)
    notes += _buffer_notes(model, spec.world_size, config)
    notes += [*low_weights_notes(entries.values(), config.precision), *rounded_input_notes(model, units)]
    activations = activation_plan(model, config.activation_checkpointing, units, check_fn)
    if activations is not None:
        notes += _cache_notes(model)
    compilation, compile_notes = compile_plan(model, config.compile, units)
    notes += compile_notes
    return ShardPlan(
        engine=engine,
        engine_reason=reason,
        strategy="NO_SHARD" if engine == "replicate" else config.sharding.strategy,
        mesh=spec,
        fingerprint=fingerprint(model),
        units=units,
        parallel=divisions.modules,
        ignored_params=tuple(entries[id(param)] for param in ignored.params),
        buffers=_buffer_entries(model),
        broadcast_buffers=config.sharding.broadcast_buffers,
        buffer_dtype=config.precision.buffer_dtype,
        storage_dtype=config.precision.storage_dtype,
        use_orig_params=config.sharding.use_orig_params,
        keep_low_precision_grads=config.precision.keep_low_precision_grads,
        activation_checkpointing=activations,
        compile=compilation,
        compiled_already=compiled_already(model, units),
        optimizer=optimizer_plan(model, config.optimizer, entries.values()),
        cpu_offload=config.cpu_offload.enabled,
        pin_memory=config.cpu_offload.pin_memory,
        backward_prefetch=config.prefetch.backward,
        forward_prefetch=config.prefetch.forward,
        sync_states=config.init.sync_states,
        seed=config.init.seed,
        device=config.init.device,
        param_init_fn=config.init.param_init_fn,
        notes=tuple(notes),
    )


def _as_config(config: ShardConfig | Mapping[str, Any] | None, settings: ShardSettings) -> ShardConfig:
    for name in settings.keys() - ShardConfig.model_fields.keys():
        known = [*ShardConfig.model_fields, *_ARGUMENTS]
        hint = advice_for(name, known, keywords=True) or closest(name, known)
        raise ConfigError(f"{name!r} is neither an argument nor a setting.{hint}")
    if isinstance(config, ShardConfig) and not settings:
        return config
    if isinstance(config, ShardConfig):
        given: Mapping[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    elif isinstance(config, Mapping):
        given = config
    elif config is None:
        given = {}
    else:
        raise ConfigError(
            f"A config must be a ShardConfig or a mapping, got {config!r} (type {type(config).__name__}). Write a dict "
            "such as {'sharding': 'FULL_SHARD', 'wrap': 'auto'}, or read a file: ShardConfig.from_file('shard.toml')."
        )
    return ShardConfig.from_dict({**given, **settings})


def _choose_engine(config: ShardConfig) -> tuple[Engine, str]:
    if config.engine != "auto":
        return config.engine, "asked for"
    if not config.sharding.use_orig_params:
        return "fsdp1", "use_orig_params=False keeps flat parameters, which only fsdp1 has"
    if config.precision.keep_low_precision_grads:
        return "fsdp1", "keep_low_precision_grads is something only fsdp1 can do"
    if config.sharding.strategy == "NO_SHARD":
        return "replicate", "NO_SHARD replicates"
    return "fsdp2", "the default"


def _engine_notes(config: ShardConfig, engine: Engine) -> list[Note]:
    notes: list[Note] = []
    if (said := untested()) is not None:
        notes.append(Note(kind="torch", text=said))
    if engine == "fsdp2" and config.sharding.strategy == "NO_SHARD":
        notes.append(
            Note(kind="engine", text="NO_SHARD on fsdp2: a mesh of shard groups of one rank; all is replicated.")
        )
    if engine != "fsdp1" and config.prefetch.backward == "post":
        notes.append(
            Note(
                kind="prefetch",
                text="backward prefetch 'post': the next unit is gathered once the current one's gradients are "
                "computed, when it is needed; memory as in FSDP1's BACKWARD_POST.",
            )
        )
    if "limit_all_gathers" in config.sharding.model_fields_set and not config.sharding.limit_all_gathers:
        notes.append(Note(kind="prefetch", text="limit_all_gathers=False has no effect: gathers are always limited."))
    if config.precision.param_dtype == "float16":
        notes.append(
            Note(
                kind="precision",
                text="float16 gradients underflow: scale the loss with mmfsdp.GradScaler (MMEngine: AmpOptimWrapper).",
            )
        )
    return notes


def _cache_notes(model: nn.Module) -> list[Note]:
    """Note that layers of transformers would fill a cache, and fill it again when they are recomputed."""
    if getattr(getattr(model, "config", None), "use_cache", False) is not True:
        return []
    return [
        Note(
            kind="other",
            text="model.config.use_cache is true: activation checkpointing fills the cache of keys and values twice, "
            "which takes memory and fails with some kinds of attention. Set model.config.use_cache = False to train.",
        )
    ]


_RUNNING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _buffer_notes(model: nn.Module, ranks: int, config: ShardConfig) -> list[Note]:
    """Note the buffers that training writes: each rank's batches write different values."""
    written = [
        f"{fqn}.running_mean" if fqn else "running_mean"
        for fqn, module in model.named_modules()
        if isinstance(module, _RUNNING) and module.track_running_stats  # SyncBatchNorm has the same on all ranks
    ]
    if not written or ranks == 1 or config.sharding.broadcast_buffers:
        return []
    return [
        Note(
            kind="buffers",
            fqns=tuple(written),
            text="training writes these buffers and those beside them, on each rank others: a checkpoint has the first "
            "rank's, a CheckpointManager those of all ranks. sharding.broadcast_buffers=True keeps them equal.",
        )
    ]


def _default_reshard(config: ShardConfig) -> bool | int:
    if config.sharding.reshard_after_forward is not None:
        return config.sharding.reshard_after_forward
    return config.sharding.strategy in {"FULL_SHARD", "HYBRID_SHARD"}


def _with_overrides(model: nn.Module, matches: list[Match], overrides: Mapping[str, Any]) -> list[Match]:
    """Make every module that a precision override names a unit."""
    have = {match.fqn for match in matches}
    extra = [
        Match(fqn, model.get_submodule(fqn), "precision override")
        for fqn in overrides
        if fqn not in have and has_forward(model.get_submodule(fqn))
    ]
    return [*extra, *matches]


def _param_entries(model: nn.Module, storage_dtype: str | None) -> dict[int, ParamEntry]:
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, UninitializedParameter):
            raise PlanError(f"Parameter {fqn!r} has no shape yet. Run one batch through lazy modules first.", fqn=fqn)
        names.setdefault(id(param), []).append(fqn)
        params[id(param)] = param
    entries = {}
    for index, (key, param) in enumerate(params.items()):
        first, *aliases = names[key]
        dtype = canonical_dtype(param.dtype)
        entries[key] = ParamEntry(
            fqn=first,
            shape=tuple(param.shape),
            dtype=storage_dtype if storage_dtype and is_floating_point(dtype) else dtype,
            requires_grad=param.requires_grad,
            aliases=tuple(aliases),
            place=index,
            divided=divided_by(param),
        )
    return entries


def _buffer_entries(model: nn.Module) -> tuple[BufferEntry, ...]:
    found: dict[int, BufferEntry] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in found:
                found[id(buffer)] = BufferEntry(
                    fqn=f"{prefix}.{name}" if prefix else name,
                    shape=tuple(buffer.shape),
                    dtype=canonical_dtype(buffer.dtype),
                    persistent=name not in module._non_persistent_buffers_set,  # torch has no public accessor
                )
    return tuple(found.values())
