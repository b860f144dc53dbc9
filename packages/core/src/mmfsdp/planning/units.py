"""From the modules a policy chose to shard units that every engine can run.

A policy only says which modules it likes. A module without ``forward`` is never called, so its parameters would
never be gathered; a parameter that two units share must be gathered by one; some modules' parameters are used by
their parent. Each change made here leaves a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.nn as nn

from mmfsdp.errors import PlanError
from mmfsdp.planning.policies import Match
from mmfsdp.planning.schema import Note

__all__ = ["UnitDraft", "draft_units", "has_forward"]


@dataclass(slots=True, eq=False)
class UnitDraft:
    """A shard unit in the making."""

    matches: list[Match]
    params: list[nn.Parameter] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules."""
        return [match.module for match in self.matches]

    @property
    def fqns(self) -> tuple[str, ...]:
        """The FQNs of the unit's modules."""
        return tuple(match.fqn for match in self.matches)


def has_forward(module: nn.Module) -> bool:
    """Tell whether calling ``module`` does anything: containers such as ``ModuleList`` only hold others."""
    return type(module).forward is not nn.Module.forward


def draft_units(
    root: nn.Module, matches: Sequence[Match], *, ignored: set[int], can_group: bool
) -> tuple[list[UnitDraft], list[Note]]:
    """Return the shard units in order of application, the root's last, and what was changed on the way.

    Args:
        root: The model.
        matches: What the policy chose.
        ignored: ``id`` of parameters that no unit manages.
        can_group: Whether the engine can run several modules as one unit.

    Raises:
        PlanError: Tied parameters make units need each other.
    """
    notes: list[Note] = []
    matches = _replace_containers(root, matches, notes)
    matches = _hoist_used_by_parent(root, matches, notes)
    drafts = [UnitDraft([match]) for match in matches] + [UnitDraft([Match("", root, "the whole model")])]
    names = {id(param): fqn for fqn, param in root.named_parameters()}
    while (shared := _first_shared(root, drafts, ignored)) is not None:
        param, owners = shared
        drafts = _settle(root, drafts, owners, names[id(param)], can_group, notes)
    _assign(root, drafts, ignored)
    kept = [draft for draft in drafts if draft.params or draft.modules == [root]]
    return _in_order(root, kept), notes


def _replace_containers(root: nn.Module, matches: Sequence[Match], notes: list[Note]) -> list[Match]:
    names = {id(module): fqn for fqn, module in root.named_modules()}
    chosen = {id(match.module) for match in matches}
    result: list[Match] = []

    def place(match: Match) -> None:
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
            place(Match(names[id(child)], child, f"{match.reason} (in {match.fqn})", match.settings))

    for match in matches:
        place(match)
    return result


def _hoist_used_by_parent(root: nn.Module, matches: list[Match], notes: list[Note]) -> list[Match]:
    """``nn.MultiheadAttention`` computes with the weights of its ``out_proj`` without calling it."""
    used = {id(module.out_proj) for module in root.modules() if isinstance(module, nn.MultiheadAttention)}
    hoisted = [match for match in matches if id(match.module) in used]
    for match in hoisted:
        notes.append(
            Note(
                kind="other",
                text="MultiheadAttention uses this module's parameters without calling it; they stay in the unit above.",
                fqns=(match.fqn,),
            )
        )
    return [match for match in matches if id(match.module) not in used]


def _owners(root: nn.Module, drafts: Iterable[UnitDraft]) -> dict[int, list[tuple[nn.Parameter, UnitDraft]]]:
    """For each parameter, by ``id``, the units below whose modules it is reached, each once."""
    unit_of = {id(module): draft for draft in drafts for module in draft.modules}
    found: dict[int, list[tuple[nn.Parameter, UnitDraft]]] = {}
    visited: set[tuple[int, int]] = set()

    def visit(module: nn.Module, unit: UnitDraft) -> None:
        unit = unit_of.get(id(module), unit)
        if (id(module), id(unit)) in visited:
            return
        visited.add((id(module), id(unit)))
        for param in module.parameters(recurse=False):
            owners = found.setdefault(id(param), [])
            if all(owner is not unit for _, owner in owners):
                owners.append((param, unit))
        for child in module.children():
            visit(child, unit)

    visit(root, unit_of[id(root)])
    return found


def _first_shared(
    root: nn.Module, drafts: list[UnitDraft], ignored: set[int]
) -> tuple[nn.Parameter, list[UnitDraft]] | None:
    for owners in _owners(root, drafts).values():
        if len(owners) > 1 and id(owners[0][0]) not in ignored:
            return owners[0][0], [unit for _, unit in owners]
    return None


def _settle(
    root: nn.Module, drafts: list[UnitDraft], owners: list[UnitDraft], name: str, can_group: bool, notes: list[Note]
) -> list[UnitDraft]:
    """Bring all owners of one parameter into one unit: as a group, or by giving up those inside another."""
    top = [unit for unit in owners if not any(_contains(other, unit) for other in owners if other is not unit)]
    if len(top) == 1 or not can_group:
        # The unit that holds all others' modules takes the parameter; without grouping that is a unit further up.
        dissolved = [unit for unit in owners if len(top) > 1 or unit is not top[0]]
        for unit in dissolved:
            notes.append(
                Note(kind="tied", text=f"shares {name!r} with another unit; its parameters move to the unit above.", fqns=unit.fqns)
            )
        return [draft for draft in drafts if draft not in dissolved]
    inner = [unit for unit in owners if unit not in top]
    group = UnitDraft([match for unit in top for match in unit.matches])
    notes.append(Note(kind="tied", text=f"share {name!r}, so they are one shard unit.", fqns=group.fqns))
    place = drafts.index(top[0])
    rest = [draft for draft in drafts if draft not in top and draft not in inner]
    return [*rest[:place], group, *rest[place:]]


def _contains(outer: UnitDraft, inner: UnitDraft) -> bool:
    below = {id(module) for top in outer.modules for module in top.modules()}
    return any(id(module) in below for module in inner.modules)


def _assign(root: nn.Module, drafts: list[UnitDraft], ignored: set[int]) -> None:
    for owners in _owners(root, drafts).values():
        param, unit = owners[0]
        if id(param) not in ignored:
            unit.params.append(param)


def _in_order(root: nn.Module, drafts: list[UnitDraft]) -> list[UnitDraft]:
    """Units below before units above; a group comes before whatever holds any of its modules."""
    unit_of = {id(module): draft for draft in drafts for module in draft.modules}
    ordered: list[UnitDraft] = []
    open_units: list[UnitDraft] = []

    def finish(unit: UnitDraft) -> None:
        if unit in ordered:
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
        ordered.append(unit)

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
    return ordered
