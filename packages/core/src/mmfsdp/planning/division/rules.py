"""Turns the rules of section `parallel` into divisions of modules and parameters along `tensor` and `expert`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from mmfsdp.basics.text import compile_pattern, name_list
from mmfsdp.config.parallel import Parallel, ParallelRule
from mmfsdp.errors import ConfigError, PlanError
from mmfsdp.planning.distributed_params import divided_tensors
from mmfsdp.planning.division.checks import check_experts, check_heads, check_module, check_sizes
from mmfsdp.planning.division.records import ModuleDivision
from mmfsdp.planning.mesh import axis_of, without_experts
from mmfsdp.planning.plan_records import MeshSpec, Note
from mmfsdp.planning.policies.patterns import match_fqns

__all__ = ["Divisions", "divide_by_rules"]

_STATED = {
    "colwise": ParallelRule(style="colwise"),
    "colwise_gather_output": ParallelRule(style="colwise", output="replicate"),
    "colwise_rep": ParallelRule(style="colwise", output="replicate"),
    "rowwise": ParallelRule(style="rowwise"),
    "rowwise_split_input": ParallelRule(style="rowwise", input="replicate"),
    "rowwise_rep": ParallelRule(style="rowwise", input="replicate"),
    "embedding_rowwise": ParallelRule(style="rowwise"),
    "embedding_colwise": ParallelRule(style="colwise", output="replicate"),
    "replicated_with_grad_allreduce": ParallelRule(style="sequence", input="heads"),
    "replicate": ParallelRule(style="replicate"),
    "ep_dispatch_experts": ParallelRule(style="experts"),
}
"""The words of transformers' plans that a rule can carry out."""


@dataclass(frozen=True, slots=True)
class Divisions:
    """What rules make of a model; all is empty without rules, or if the axes that they divide along have one rank."""

    modules: tuple[ModuleDivision, ...] = ()
    params: Mapping[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    """By ``id``, the axes that divide a parameter; see ``ParamEntry.divided``."""
    notes: tuple[Note, ...] = ()

    @property
    def axes(self) -> set[str]:
        """The axes that divide any parameter."""
        return {axis for divided in self.params.values() for axis, _ in divided}


def divide_by_rules(
    model: nn.Module, rules: Parallel, given: Any, mesh: MeshSpec, ignored: Collection[int]
) -> Divisions:
    """Return how rules divide a model. Pure.

    Args:
        model: The model, on any device, not divided yet.
        rules: The section ``parallel``.
        given: The mesh as the user gave it.
        mesh: The mesh.
        ignored: ``id`` of the parameters that are not sharded.

    Raises:
        ConfigError: The mesh lacks the axis that a rule divides along, or the model states no plan that rules can carry
            out.
        PolicyError: A pattern matches no module.
        PlanError: A module cannot be divided by its rule; or parameters that are tied would be divided in two ways.
    """
    if rules is None:
        return Divisions()
    named = _named(given)
    usable = [axis for axis in ("tensor", "expert") if getattr(mesh, axis) > 1 or axis in named]
    if not usable:
        raise ConfigError(
            f"parallel divides modules along the axis 'tensor', and the mesh, {mesh}, has none. Give it its "
            "ranks, such as mesh={'shard': -1, 'tensor': 2}, or leave parallel out.",
            config="parallel",
        )
    names = {fqn: module for fqn, module in model.named_modules(remove_duplicate=False) if fqn}
    chosen, notes = _stated_along(model, names, usable) if rules == "auto" else (_matching(rules, names), [])
    modules = _once(chosen, names)
    if rules == "auto":
        notes += _divide_ties(modules, names)
    found: dict[int, tuple[tuple[str, int], ...]] = {}
    divided = {id(tensor): fqn for fqn, tensor in divided_tensors(model)}
    for fqn, rule in modules.items():
        if again := [divided[id(param)] for param in names[fqn].parameters() if id(param) in divided]:
            raise PlanError(
                f"{again[0]!r} is divided already, and a rule of parallel would divide it again. Leave parallel out, "
                "or give the model as it was built.",
                fqn=again[0],
            )
        parent = names.get(fqn.rpartition(".")[0], model)
        check_module(fqn, names[fqn], parent, rule, ignored)
        if rule.style != "replicate" and rule.axis not in usable:
            raise ConfigError(
                f"parallel divides {fqn!r} along the axis {rule.axis!r}, and the mesh, {mesh}, has none. Give it its "
                f"ranks, such as mesh={{'shard': -1, {rule.axis!r}: 2}}, or leave the rule out.",
                config="parallel",
            )
        if rule.style == "experts":
            check_experts(names[fqn], mesh.expert, fqn)
        elif rule.style != "replicate":
            check_sizes(fqn, names[fqn], rule, mesh.tensor)
            check_heads(fqn, names[fqn], parent, rule, mesh.tensor, _taken(fqn, modules, names))
    divisions = tuple(_division(fqn, rule, names[fqn]) for fqn, rule in modules.items() if rule.style != "replicate")
    for division in divisions:
        module = names[division.fqn]
        for name, param in module.named_parameters(recurse=False):
            found[id(param)] = division.divided(name, is_embedding=isinstance(module, nn.Embedding))
    _check_ties(model, {division.fqn: division for division in divisions}, names)
    if not any(found.values()):
        raise ConfigError(
            "parallel divides no parameter: no rule with style 'colwise' or 'rowwise' is left.", config="parallel"
        )
    used = {axis for axis in usable if getattr(mesh, axis) > 1}
    kept = tuple(division for division in divisions if modules[division.fqn].axis in used)
    params = {param: divided for param, divided in found.items() if {axis for axis, _ in divided} <= used}
    return Divisions(kept, params, tuple(notes)) if kept else Divisions()


def _named(given: Any) -> set[str | None]:
    """Return the axes that a mesh names, though they may have one rank."""
    if isinstance(given, MeshSpec):
        return {"tensor", "expert"}
    if isinstance(given, Mapping):
        return {*map(axis_of, given)}
    names = (getattr(mesh, "mesh_dim_names", None) or () for mesh in without_experts(given))
    return {axis_of(name) for name in itertools.chain(*names)}


def _stated_along(
    model: nn.Module, names: Mapping[str, nn.Module], axes: Collection[str]
) -> tuple[dict[str, ParallelRule], list[Note]]:
    """Return the rules that models of transformers state for some axes; those of experts win."""
    experts, notes = _stated(model, names, "_ep_plan") if "expert" in axes else ({}, [])
    if "tensor" not in axes:
        return experts, notes
    rest, more = _stated(model, names, "_tp_plan", apart=[*experts])
    return {**rest, **experts}, [*notes, *more]


def _matching(rules: Mapping[str, ParallelRule], names: Mapping[str, nn.Module]) -> dict[str, ParallelRule]:
    """Return the rule of each module that a pattern matches; a later pattern wins."""
    found = {}
    for pattern, rule in rules.items():
        for fqn in match_fqns([pattern], names, what="module", config="parallel"):
            found[fqn] = rule
    return found


def _stated(
    model: nn.Module, names: Mapping[str, nn.Module], attribute: str, apart: Collection[str] = ()
) -> tuple[dict[str, ParallelRule], list[Note]]:
    """Return the rules that models of transformers state in an attribute, with a note; but for some modules."""
    found: dict[str, ParallelRule] = {}
    notes: list[Note] = []
    params = [fqn for fqn, _ in model.named_parameters()]
    for prefix, module in [("", model), *names.items()]:
        plan = getattr(module, attribute, None)
        if not isinstance(plan, Mapping) or not plan or any(prefix.startswith(f"{note.fqns[0]}.") for note in notes):
            continue  # the plan of a whole model has those of the models in it
        if any(note.fqns[0] == "" for note in notes):
            break
        unmatched = []
        for pattern, word in plan.items():
            regex = compile_pattern(f"{prefix}.{pattern}" if prefix else pattern)
            hits = [fqn for fqn in names if regex.fullmatch(fqn)]
            of_params = [fqn for fqn in params if regex.fullmatch(fqn)] if word != "grouped_gemm" else []
            if word == "grouped_gemm" or any(
                fqn == one or fqn.startswith(f"{one}.") for fqn in (*hits, *of_params) for one in apart
            ):
                continue  # of experts, which are divided as a module
            if (hits and word not in _STATED) or of_params:
                raise ConfigError(
                    f"{type(module).__name__} states {word!r} for {pattern!r}, which is {(hits or of_params)[0]!r}, "
                    f"and rules cannot carry that out. They know: {', '.join(_STATED)}. Write rules for the other "
                    "modules, such as parallel={'**.q_proj': 'colwise', '**.o_proj': 'rowwise'}, and leave this one "
                    "whole.",
                    config="parallel",
                )
            found |= dict.fromkeys(hits, _STATED[word]) if hits else {}
            unmatched += [] if hits else [pattern]
        left = f" Its plan names modules that it does not have: {name_list(unmatched)}." if unmatched else ""
        notes.append(Note(kind="other", text=f"parallel: as {type(module).__name__} states.{left}", fqns=(prefix,)))
    if not found:
        raise ConfigError(
            f"parallel='auto' takes the plan that a model of transformers states; {type(model).__name__} has none. "
            "Write rules: parallel={'blocks.*.fc1': 'colwise', 'blocks.*.fc2': 'rowwise'}.",
            config="parallel",
        )
    return found, notes


def _once(chosen: Mapping[str, ParallelRule], names: Mapping[str, nn.Module]) -> dict[str, ParallelRule]:
    """Return each module once, by its first name, in the order of the model."""
    by_module: dict[int, tuple[str, ParallelRule]] = {}
    for fqn, rule in chosen.items():
        key = id(names[fqn])
        if key in by_module and by_module[key][1] != rule:
            raise PlanError(
                f"{by_module[key][0]!r} and {fqn!r} are one module, and parallel has two rules for it. Give one.",
                fqn=fqn,
            )
        by_module.setdefault(key, (fqn, rule))
    first: dict[str, ParallelRule] = {}
    for fqn, module in names.items():
        if (found := by_module.pop(id(module), None)) is not None:
            first[fqn] = found[1]
    return first


def _taken(fqn: str, modules: Mapping[str, ParallelRule], names: Mapping[str, nn.Module]) -> set[int]:
    """Return the numbers of features that ``rowwise`` layers beside a module take."""
    beside = fqn.rpartition(".")[0]
    return {
        module.in_features
        for other, rule in modules.items()
        if other.rpartition(".")[0] == beside and rule.style == "rowwise"
        if isinstance(module := names[other], nn.Linear)
    }


def _division(fqn: str, rule: ParallelRule, module: nn.Module) -> ModuleDivision:
    inputs, outputs = rule.layouts
    if isinstance(module, nn.Embedding):
        inputs = "replicate"
    return ModuleDivision.model_validate({"fqn": fqn, "style": rule.style, "input": inputs, "output": outputs})


def _divide_ties(modules: dict[str, ParallelRule], names: Mapping[str, nn.Module]) -> list[Note]:
    """Divide embeddings that are tied to a divided head, which the plans of transformers leave out."""
    heads = {
        id(module.weight): fqn
        for fqn, rule in modules.items()
        if rule.style == "colwise" and isinstance(module := names[fqn], nn.Linear)
    }
    notes = []
    for fqn, module in names.items():
        if isinstance(module, nn.Embedding) and fqn not in modules and (head := heads.get(id(module.weight))):
            modules[fqn] = _STATED["embedding_rowwise"]
            notes.append(
                Note(kind="tied", text=f"parallel: divided by rows, as {head!r} is, which it is tied to.", fqns=(fqn,))
            )
    return notes


def _check_ties(model: nn.Module, divisions: Mapping[str, ModuleDivision], names: Mapping[str, nn.Module]) -> None:
    """Raise if the modules that share a parameter would divide it in two ways."""
    first: dict[int, tuple[str, tuple[tuple[str, int], ...]]] = {}
    for fqn, module in [("", model), *names.items()]:
        for name, param in module.named_parameters(recurse=False):
            own = f"{fqn}.{name}" if fqn else name
            is_embedding = isinstance(module, nn.Embedding)
            found = divisions[fqn].divided(name, is_embedding=is_embedding) if fqn in divisions else ()
            known, before = first.setdefault(id(param), (own, found))
            if before != found and names.get(known.rpartition(".")[0]) is not module:
                raise PlanError(
                    f"{known!r} and {own!r} are one parameter. The rules of parallel divide {known!r} "
                    f"{_said(before)} and {own!r} {_said(found)}. Divide both alike: an embedding by style 'rowwise' "
                    "and a linear layer by 'colwise' are divided along dimension 0; or keep both whole.",
                    fqn=own,
                )


def _said(divided: tuple[tuple[str, int], ...]) -> str:
    return f"along dimension {divided[0][1]}" if divided else "not at all"
