"""Turns the modules that a policy chose into shard units that every engine can run.

A policy only chooses modules. A module without ``forward`` is never called, so its parameters would never be gathered;
a parameter that two units share must belong to one of them; and some modules use the parameters of a child without
calling it. Each change made here leaves a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.nn as nn

from mmfsdp.errors import PlanError
from mmfsdp.planning.compiled import compiled_around, is_compiled_wrapper
from mmfsdp.planning.plan_records import Note
from mmfsdp.planning.policies.matching import Match, own_parameters

__all__ = ["UnitDraft", "draft_units", "has_forward"]


@dataclass(slots=True, eq=False)
class UnitDraft:
    """A shard unit under construction."""

    matches: list[Match]
    params: list[int] = field(default_factory=list)
    """``id`` of each parameter. Not the parameters: sharding frees one only if nothing refers to it."""

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules."""
        return [match.module for match in self.matches]

    @property
    def fqns(self) -> tuple[str, ...]:
        """The FQNs of the unit's modules."""
        return tuple(match.fqn for match in self.matches)


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` can be called; containers such as ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or is_compiled_wrapper(module)


def draft_units(
    root: nn.Module, matches: Sequence[Match], *, ignored: set[int], can_group: bool
) -> tuple[list[UnitDraft], list[Note]]:
    """Return the shard units in order of application, the root last, and notes on changes.

    Args:
        root: The model.
        matches: The modules that the policy chose.
        ignored: ``id`` of parameters that no unit manages.
        can_group: Whether the engine can run several modules as one unit.

    Raises:
        PlanError: Tied parameters make units depend on each other in a circle.
    """
    notes: list[Note] = []
    matches = _replace_containers(root, matches, notes)
    matches = _hoist_used_by_parent(root, matches, notes)
    matches = _hoist_to_compiled(root, matches)
    drafts = [UnitDraft([match]) for match in matches] + [UnitDraft([Match("", root, "the whole model")])]
    names: dict[int, str] = {}
    while shared := _shared(owned := _owners(root, drafts, ignored)):
        names = names or {id(param): fqn for fqn, param in root.named_parameters()}
        for param, owners in shared:
            # Units that an earlier tie changed are checked again in the next round.
            if all(owner in drafts for owner in owners):
                drafts = _settle(drafts, owners, names[param], can_group, notes)
    for param, owners in owned:
        owners[0].params.append(param)
    kept = [draft for draft in drafts if draft.params or draft.modules == [root]]
    return _in_order(root, kept), notes


def _replace_containers(root: nn.Module, matches: Sequence[Match], notes: list[Note]) -> list[Match]:
    if all(has_forward(match.module) for match in matches):
        return list(matches)
    names = {id(module): fqn for fqn, module in root.named_modules()}
    chosen = {id(match.module) for match in matches}
    result: list[Match] = []

    def add_units(match: Match) -> None:
        if has_forward(match.module):
            result.append(match)
            return
        children = [child for child in match.module.children() if id(child) not in chosen]
        notes.append(
            Note(
                kind="container",
                text=f"{type(match.module).__name__} has no forward of its own, so "
                + ("its children are shard units in its place." if children else "it is no shard unit."),
                fqns=(match.fqn,),
            )
        )
        for child in children:
            chosen.add(id(child))
            add_units(Match(names[id(child)], child, f"{match.reason} (in {match.fqn})", match.settings))

    for match in matches:
        add_units(match)
    return result


def _hoist_used_by_parent(root: nn.Module, matches: list[Match], notes: list[Note]) -> list[Match]:
    """Drop units inside ``nn.MultiheadAttention``, which uses the weights of ``out_proj`` without calling it."""
    used = {id(module.out_proj) for module in root.modules() if isinstance(module, nn.MultiheadAttention)}
    hoisted = [match for match in matches if id(match.module) in used]
    for match in hoisted:
        notes.append(
            Note(
                kind="other",
                text="MultiheadAttention uses its parameters without calling it; they stay in the unit above.",
                fqns=(match.fqn,),
            )
        )
    return [match for match in matches if id(match.module) not in used]


def _hoist_to_compiled(root: nn.Module, matches: list[Match]) -> list[Match]:
    """Make a compiled wrapper the unit in place of the module in it: a compiler cannot gather its own module."""
    parents: dict[int, list[nn.Module]] = {}
    names: dict[int, str] = {}
    for fqn, module in root.named_modules():
        names[id(module)] = fqn
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    hoisted = []
    for match in matches:
        around = compiled_around(match.module, parents)
        if around is match.module or around is root:
            hoisted.append(match)
        else:
            hoisted.append(Match(names[id(around)], around, f"{match.reason} (compiled)", match.settings))
    return list({id(match.module): match for match in hoisted}.values())


def _owners(root: nn.Module, drafts: Iterable[UnitDraft], ignored: set[int]) -> list[tuple[int, list[UnitDraft]]]:
    """Return by ``id`` of each parameter that is not ignored the units that reach it through their modules."""
    unit_of = {id(module): draft for draft in drafts for module in draft.modules}
    found: dict[int, list[UnitDraft]] = {}
    visited: set[tuple[int, int]] = set()

    def visit(module: nn.Module, unit: UnitDraft) -> None:
        unit = unit_of.get(id(module), unit)
        if (id(module), id(unit)) in visited:
            return
        visited.add((id(module), id(unit)))
        for param in own_parameters(module):
            if id(param) not in ignored:
                owners = found.setdefault(id(param), [])
                if unit not in owners:
                    owners.append(unit)
        for child in module.children():
            visit(child, unit)

    visit(root, unit_of[id(root)])
    return list(found.items())


def _shared(owned: list[tuple[int, list[UnitDraft]]]) -> list[tuple[int, list[UnitDraft]]]:
    return [(param, owners) for param, owners in owned if len(owners) > 1]


def _settle(
    drafts: list[UnitDraft], owners: list[UnitDraft], name: str, can_group: bool, notes: list[Note]
) -> list[UnitDraft]:
    """Bring all owners of a tied parameter into one unit: join them, or drop units inside another."""
    top = _topmost([match for unit in owners for match in unit.matches])
    holder = next((unit for unit in owners if unit.matches == top), None)
    # The unit that holds all others' modules takes the parameter; without grouping that is a unit further up.
    replacement = holder or (UnitDraft(top) if can_group else None)
    kept = {id(match.module) for match in replacement.matches} if replacement else set()
    for match in (match for unit in owners for match in unit.matches if id(match.module) not in kept):
        notes.append(
            Note(
                kind="tied",
                text=f"shares {name!r} with another unit; its parameters move to the unit above.",
                fqns=(match.fqn,),
            )
        )
    if replacement is not None and replacement is not holder:
        notes.append(Note(kind="tied", text=f"share {name!r}, so they are one shard unit.", fqns=replacement.fqns))
    rest = [draft for draft in drafts if draft not in owners]
    return [*rest, replacement] if replacement else rest


def _topmost(matches: list[Match]) -> list[Match]:
    """Return the units whose modules are in no other unit."""
    nested = {id(module) for match in matches for module in match.module.modules() if module is not match.module}
    return [match for match in matches if id(match.module) not in nested]


def _in_order(root: nn.Module, drafts: list[UnitDraft]) -> list[UnitDraft]:
    """Sort units below before units above; a group comes before any unit that holds one of its modules."""
    unit_of = {id(module): draft for draft in drafts for module in draft.modules}
    ordered: dict[int, UnitDraft] = {}
    open_units: list[UnitDraft] = []

    def finish(unit: UnitDraft) -> None:
        if id(unit) in ordered:
            return
        if unit in open_units:
            raise PlanError(
                "Tied parameters tie these shard units into a circle: "
                f"{', '.join(repr(u.fqns) for u in open_units)}. Wrap a module that holds all of them instead."
            )
        open_units.append(unit)
        for module in unit.modules:
            descend(module, {id(module)})
        open_units.pop()
        ordered[id(unit)] = unit

    def descend(module: nn.Module, visited: set[int]) -> None:
        for child in module.children():
            if id(child) in visited:
                continue
            visited.add(id(child))
            if id(child) in unit_of:
                finish(unit_of[id(child)])
            else:
                descend(child, visited)

    finish(unit_of[id(root)])
    return list(ordered.values())
