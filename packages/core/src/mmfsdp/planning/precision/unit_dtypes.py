"""Determines the dtypes of each shard unit from the precision settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch.nn as nn

from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.config import PrecisionConfig
from mmfsdp.config.precision import PrecisionOverride
from mmfsdp.errors import PolicyError
from mmfsdp.planning.plan_records import Note, ParamEntry, ShardUnit, UnitPrecision
from mmfsdp.planning.policies.matching import Match
from mmfsdp.planning.policies.patterns import match_classes, match_fqns
from mmfsdp.planning.precision.kept_in_float32 import holds_kept, is_kept
from mmfsdp.planning.units import has_forward

__all__ = [
    "full_precision_classes",
    "low_weights_notes",
    "override_matches",
    "rounded_input_notes",
    "unit_precision",
    "unit_reshard",
]

_SETTINGS = ("sharding_strategy", "mixed_precision", "reshard_after_forward")
_UNIT_DTYPES = ("param_dtype", "reduce_dtype", "cast_forward_inputs")

_LOW = {"float16", "bfloat16"}
_TIMES = {"timestep", "timesteps", "sigma", "sigmas"}
_TABLES = {"rotary_emb", "image_rotary_emb", "rotary_embs", "freqs", "freqs_cis", "freqs_cos", "freqs_sin"}


def full_precision_classes(model: nn.Module, config: PrecisionConfig) -> dict[type, str] | None:
    """Return the classes in ``model`` that stay in full precision, each with the reason for making it a unit.

    None if all of the model computes in the dtype of its parameters.
    """
    if config.param_dtype is None:
        return None
    classes = match_classes(config.ignore_classes, dict(model.named_modules()), must_match=False)
    return {cls: f"full precision: {name.rpartition('.')[2]}" for cls, name in classes.items()}


def override_matches(model: nn.Module, config: PrecisionConfig) -> dict[str, PrecisionOverride]:
    """Return the precision override of each module that one names, by FQN.

    Raises:
        PolicyError: An override names neither a class nor an FQN of the model.
    """
    if not config.overrides:
        return {}
    modules = {fqn: module for fqn, module in model.named_modules(remove_duplicate=False) if fqn}
    first_name = {id(module): fqn for fqn, module in reversed(modules.items())}
    found: dict[str, PrecisionOverride] = {}
    for override in config.overrides:
        for name in override.modules:
            classes = match_classes([name], modules, must_match=False)
            hits = [fqn for fqn, module in modules.items() if type(module) in classes]
            if not hits and name.isidentifier() and name not in modules and not name.islower():
                match_classes([name], modules, config="precision.overrides")  # spelt like a class: suggest classes
            for fqn in hits or match_fqns([name], modules, what="module or class", config="precision.overrides"):
                for module in _callable_modules(modules[fqn]):
                    found.setdefault(first_name[id(module)], override)
    return found


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Return the module itself, or the children of a container without ``forward``."""
    if has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _callable_modules(child)


def unit_precision(
    match: Match | None,
    config: PrecisionConfig,
    full: Mapping[type, str] | None,
    overrides: Mapping[str, PrecisionOverride],
    kept: Set[str] = frozenset(),
) -> UnitPrecision:
    """Return the dtypes of one unit.

    Args:
        match: The module that makes the unit; None is the root.
        config: The model-wide settings.
        full: Classes that stay in full precision.
        overrides: FQN to override.
        kept: FQNs of modules that the model declares to need float32.

    Raises:
        PolicyError: The policy gave the module an unknown setting of mixed precision.
    """
    if match is None:
        return UnitPrecision(
            param_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            output_dtype=config.output_dtype,
            cast_forward_inputs=(
                config.cast_forward_inputs
                if config.cast_root_forward_inputs is None
                else config.cast_root_forward_inputs
            ),
        )
    if "mixed_precision" in match.settings:
        return _from_torch(match.settings["mixed_precision"], match.fqn)
    if match.fqn in overrides:
        override = overrides[match.fqn]
        return UnitPrecision(
            param_dtype=override.param_dtype,
            reduce_dtype=override.reduce_dtype or override.param_dtype,
            cast_forward_inputs=override.cast_forward_inputs,
            full_precision=override.param_dtype in (None, "float32"),
        )
    if is_kept(match.fqn, kept) and _is_stored_lower(match.module, config.storage_dtype):
        return UnitPrecision(
            param_dtype="float32", reduce_dtype="float32", cast_forward_inputs=False, full_precision=True
        )
    if (full is not None and type(match.module) in full) or is_kept(match.fqn, kept):
        return UnitPrecision(cast_forward_inputs=False, full_precision=True)
    return UnitPrecision(
        param_dtype=config.param_dtype,
        reduce_dtype=config.reduce_dtype,
        # Tensors that kept modules add to are float32, and may overflow float16. Layers cast them where they need to.
        cast_forward_inputs=config.cast_forward_inputs and not holds_kept(match.fqn, kept),
    )


def _is_stored_lower(module: nn.Module, storage_dtype: str | None) -> bool:
    """Tell whether shards of a module are stored in fewer bits than float32, so that what computes is to be cast."""
    dtypes = [storage_dtype] if storage_dtype else [canonical_dtype(param.dtype) for param in module.parameters()]
    return any(dtype in ("float16", "bfloat16") for dtype in dtypes)


def unit_reshard(match: Match, default: bool | int, *, replicated: bool = False) -> bool | int:
    """Return whether a unit reshards after forward, from the policy's settings for it.

    Args:
        match: The module that makes the unit.
        default: The configuration's value.
        replicated: Whether every rank holds everything; then no unit reshards.

    Raises:
        PolicyError: The policy gave the module a setting that is unknown or wrong.
    """
    unknown = sorted(set(match.settings) - set(_SETTINGS))
    if unknown:
        raise PolicyError(
            f"The policy gives module {match.fqn!r} the setting {unknown[0]!r}, which a shard unit does not have. "
            f"Accepted: {', '.join(_SETTINGS)}.",
            fqn=match.fqn,
        )
    given = match.settings.get("reshard_after_forward", default)
    if not isinstance(given, bool) and not (isinstance(given, int) and given > 1):
        raise PolicyError(
            f"The policy gives module {match.fqn!r} reshard_after_forward={given!r}; expected True, False or a group "
            "size of at least 2.",
            fqn=match.fqn,
        )
    strategy = match.settings.get("sharding_strategy")
    name = getattr(strategy, "name", str(strategy)).upper()
    if strategy is not None and name not in {"FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}:
        raise PolicyError(
            f"The policy gives module {match.fqn!r} the strategy {name!r}; one unit of a sharded model can have "
            "'FULL_SHARD' or 'SHARD_GRAD_OP'. To keep a module whole, list it in sharding.ignored_modules.",
            fqn=match.fqn,
        )
    if replicated:
        return False
    if strategy is None or "reshard_after_forward" in match.settings:
        return given
    return name in {"FULL_SHARD", "HYBRID_SHARD"}


def _from_torch(policy: Any, fqn: str) -> UnitPrecision:
    """Read torch's ``MixedPrecision`` (FSDP1), ``MixedPrecisionPolicy`` (FSDP2), a dict of their fields, or None."""
    if policy is None:
        return UnitPrecision(cast_forward_inputs=False, full_precision=True)
    if isinstance(policy, Mapping):
        settings = dict(policy)
    elif hasattr(policy, "param_dtype"):
        settings = {name: getattr(policy, name) for name in _UNIT_DTYPES if hasattr(policy, name)}
    else:
        raise PolicyError(
            f"The policy gives module {fqn!r} mixed_precision={policy!r} (type {type(policy).__name__}); "
            "expected torch's MixedPrecision or MixedPrecisionPolicy, a dict of their fields, or None.",
            fqn=fqn,
        )
    unknown = sorted(set(settings) - set(_UNIT_DTYPES))
    if unknown:
        raise PolicyError(
            f"The policy gives module {fqn!r} the mixed_precision setting {unknown[0]!r}, which a shard unit does not "
            f"have. Accepted: {', '.join(_UNIT_DTYPES)}.",
            fqn=fqn,
        )
    param_dtype = settings.get("param_dtype")
    reduce_dtype = settings.get("reduce_dtype") or param_dtype
    return UnitPrecision(
        param_dtype=None if param_dtype is None else canonical_dtype(param_dtype),
        reduce_dtype=None if reduce_dtype is None else canonical_dtype(reduce_dtype),
        cast_forward_inputs=bool(settings.get("cast_forward_inputs", True)),
    )


def low_weights_notes(params: Iterable[ParamEntry], config: PrecisionConfig) -> list[Note]:
    """Return a note if the optimizer will train weights of low precision although only the compute dtype was asked for.

    Args:
        params: All parameters, with the dtypes of their shards.
        config: The model-wide settings.
    """
    if config.param_dtype not in _LOW or config.storage_dtype is not None:
        return []
    low = [param.dtype for param in params if param.requires_grad and param.dtype in _LOW]
    if not low:
        return []
    return [
        Note(
            kind="dtype",
            text=f"the model's weights are {low[0]} before sharding, so the optimizer updates {low[0]} and keeps its "
            "states in it, and small updates are lost. Set precision.storage_dtype to 'float32', or load the "
            "model in float32.",
        )
    ]


def rounded_input_notes(model: nn.Module, units: Sequence[ShardUnit]) -> list[Note]:
    """Return notes on inputs that lose digits that matter if they are floats: timesteps, and tables of rotations.

    Args:
        model: The model.
        units: Its shard units, the root last.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for unit in units:
        dtype = unit.precision.param_dtype
        if dtype in _LOW and unit.precision.cast_forward_inputs:
            for name in _inputs(model.get_submodule(unit.fqn)) & (_TIMES | _TABLES):
                found.setdefault((name, str(dtype), "" if unit.is_root else unit.class_name), []).append(unit.fqn)
    notes = []
    for (name, dtype, class_name), fqns in sorted(found.items()):
        what = f"input {name!r}, if it is a float, is rounded to {dtype}" + (
            ", as 999.0 to 1000.0; integers are not. " if name in _TIMES and dtype == "bfloat16" else ". "
        )
        if class_name:
            settings = f"{{'modules': {class_name!r}, 'param_dtype': {dtype!r}, 'reduce_dtype': 'float32', "
            way = f"precision.overrides=[{settings}'cast_forward_inputs': False}}] leaves the inputs of these units as "
        else:
            way = "precision.cast_root_forward_inputs=False leaves the inputs of the whole model as "
        notes.append(
            Note(kind="precision", text=f"{what}{way}they are: cast those that need it yourself.", fqns=tuple(fqns))
        )
    return notes


def _inputs(module: nn.Module) -> set[str]:
    try:
        return {*inspect.signature(module.forward).parameters}
    except (TypeError, ValueError):  # a forward that is not written in Python
        return set()
