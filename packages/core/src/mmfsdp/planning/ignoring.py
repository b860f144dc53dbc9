"""Selects the parameters that stay whole on every rank: given ones, and those that cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.nn as nn

from mmfsdp.config import ShardingConfig
from mmfsdp.errors import PlanError
from mmfsdp.planning.plan_records import Note
from mmfsdp.planning.policies.patterns import match_fqns

__all__ = ["Ignored", "ignored_states"]

_T = TypeVar("_T")

_UNSHARDABLE: dict[Literal["scalar", "empty"], tuple[str, Callable[[nn.Parameter], bool]]] = {
    "scalar": (
        "a scalar has no dimension to shard: held whole on every rank, gradients averaged.",
        lambda param: param.dim() == 0,
    ),
    "empty": (
        "a parameter without elements, whose gradient torch cannot reduce: held by every rank.",
        lambda param: param.numel() == 0,
    ),
}


@dataclass(frozen=True, slots=True)
class Ignored:
    """Modules and parameters that no shard unit manages."""

    modules: list[nn.Module]
    params: list[nn.Parameter]
    notes: list[Note]


def ignored_states(
    model: nn.Module,
    sharding: ShardingConfig,
    modules: Iterable[nn.Module],
    params: Iterable[nn.Parameter],
    *,
    whole: bool,
) -> Ignored:
    """Collect the ignored modules and parameters.

    Args:
        model: The model.
        sharding: Settings with FQN patterns.
        modules: Module objects; all their parameters are ignored.
        params: Parameter objects.
        whole: Whether to ignore scalars and parameters without elements, too, which cannot be sharded.

    Raises:
        PolicyError: A pattern matches nothing.
        PlanError: An object is not part of the model.
    """
    named_params = dict(model.named_parameters(remove_duplicate=False))
    chosen_modules = _checked(modules, model.modules, "ignored_modules")
    if sharding.ignored_modules:
        # A shared module has several names.
        named_modules = {fqn: module for fqn, module in model.named_modules(remove_duplicate=False) if fqn}
        matched = match_fqns(sharding.ignored_modules, named_modules, what="module", config="sharding.ignored_modules")
        chosen_modules += [named_modules[fqn] for fqn in matched]
    chosen = {
        id(named_params[fqn])
        for fqn in match_fqns(
            sharding.ignored_parameters, named_params, what="parameter", config="sharding.ignored_parameters"
        )
    }
    chosen |= {id(param) for param in _checked(params, named_params.values, "ignored_params")}
    chosen |= {id(param) for module in chosen_modules for param in module.parameters()}
    notes = []
    for kind, (text, unshardable) in _UNSHARDABLE.items() if whole else ():
        found = {
            id(param): fqn
            for fqn, param in reversed(named_params.items())
            if id(param) not in chosen and unshardable(param)
        }
        if found:
            chosen |= found.keys()
            notes.append(Note(kind=kind, text=text, fqns=tuple(reversed(found.values()))))
    ignored = {id(param): param for param in named_params.values() if id(param) in chosen}
    return Ignored(chosen_modules, list(ignored.values()), notes)


def _checked(objects: Iterable[_T], present: Callable[[], Iterable[_T]], argument: str) -> list[_T]:
    given = list(objects)
    known = {id(item) for item in present()} if given else set()
    for item in given:
        if id(item) not in known:
            raise PlanError(f"{argument} holds {type(item).__name__} objects that are not part of the model.")
    return given
