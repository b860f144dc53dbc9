"""Finds the modules that a model of transformers or diffusers declares to need float32.

Both read ``_keep_in_fp32_modules`` when they load weights as float16. ``_keep_in_fp32_modules_strict`` of transformers
also binds bfloat16. There is no public accessor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

import torch.nn as nn

from mmfsdp.basics.text import name_list
from mmfsdp.config import PrecisionConfig
from mmfsdp.planning.plan_records import Note
from mmfsdp.planning.policies.matching import Match
from mmfsdp.planning.units import has_forward

__all__ = ["holds_kept", "is_kept", "kept_in_float32"]

_BINDING = {
    "float16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    "bfloat16": ("_keep_in_fp32_modules_strict",),
}


def kept_in_float32(model: nn.Module, config: PrecisionConfig, others: set[str]) -> tuple[list[Match], list[Note]]:
    """Return the modules that compute in float32 because the model declares it, and notes on what was decided.

    Args:
        model: The model.
        config: The model-wide settings.
        others: FQNs of modules whose dtypes the user chose, which count for more.
    """
    names = [*_declared(model, _BINDING.get(config.param_dtype or "", ()))]
    if not names:
        return [], []
    # An entry names whole parts of an FQN: of a module, or of a parameter.
    entries = "|".join(re.escape(name).replace(re.escape("*"), ".*") for name in names)
    pattern = re.compile(rf"(?:^|\.)(?:{entries})(?=\.|$)")
    modules = dict(model.named_modules())
    params = [fqn for fqn, _ in model.named_parameters() if pattern.search(fqn)]
    found: dict[str, Match] = {}
    alone: list[str] = []
    for param in params:
        hit = pattern.search(param)
        assert hit is not None
        at = _module_of(param, hit.end(), modules, {*params})
        if at is None:
            alone.append(param)
        elif not is_kept(at, {*others, *found}):
            found[at] = Match(at, modules[at], "kept in float32: declared by the model")
    return [*found.values()], _notes([*found], alone, str(config.param_dtype))


def is_kept(fqn: str, kept: Set[str]) -> bool:
    """Return whether a module is, or lies inside, one of those in ``kept``."""
    parts = fqn.split(".")
    return any(".".join(parts[:end]) in kept for end in range(1, len(parts) + 1))


def holds_kept(fqn: str, kept: Set[str]) -> bool:
    """Return whether a module below the root holds one of those in ``kept``."""
    return any(name.startswith(f"{fqn}.") for name in kept)


def _declared(model: nn.Module, attributes: tuple[str, ...]) -> Iterator[str]:
    found = {
        name: None
        for module in model.modules()
        for attribute in attributes
        for name in sorted(getattr(module, attribute, None) or ())
    }
    yield from found


def _module_of(param: str, end: int, modules: dict[str, nn.Module], params: set[str]) -> str | None:
    """Return the FQN of the outermost module to keep for a parameter, or None if no module has only such parameters."""
    owner = param.rpartition(".")[0]
    at = param[:end] if end < len(param) else owner
    while at != owner and not has_forward(modules[at]):  # a container is never called
        at = param[: (param + ".").index(".", len(at) + 1)]
    if not at or not has_forward(modules[at]):
        return None
    below = {f"{at}.{name}" for name, _ in modules[at].named_parameters()}
    return at if below <= params else None


def _notes(kept: list[str], alone: list[str], dtype: str) -> list[Note]:
    notes = []
    if kept:
        notes.append(
            Note(
                kind="precision",
                text=f"compute in float32, as the model declares for {dtype}, each as a shard unit of its own. "
                "precision.overrides for these modules changes that.",
                fqns=tuple(kept),
            )
        )
    if alone:
        notes.append(
            Note(
                kind="precision",
                text=f"the model declares float32 for {name_list(alone, 4)}, but computes with "
                f"{'it' if len(alone) == 1 else 'them'} in modules that have other parameters, so {dtype} it is. "
                "sharding.ignored_parameters keeps them whole and in their own dtype.",
            )
        )
    return notes
