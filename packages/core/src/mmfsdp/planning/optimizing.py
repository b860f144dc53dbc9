"""Chooses the optimizer of each parameter: Muon for matrices of hidden layers, AdamW for all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.config import OptimizerConfig
from mmfsdp.errors import PlanError
from mmfsdp.planning.optimizer_groups import OptimizerGroup, OptimizerPlan
from mmfsdp.planning.plan_records import ParamEntry
from mmfsdp.planning.policies.patterns import match_fqns

__all__ = ["optimizer_plan"]

_OUTPUTS = {"lm_head", "head", "heads", "classifier", "fc", "cls", "score", "output", "embed_out", "output_layer"}
_ROUTERS = {"gate", "router", "gating", "shared_expert_gate"}
_FUSED = {"in_proj_weight": 3}  # of nn.MultiheadAttention: q, k and v one below the other
_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def optimizer_plan(
    model: nn.Module, config: OptimizerConfig | None, entries: Iterable[ParamEntry]
) -> OptimizerPlan | None:
    """Return which optimizer updates each parameter that is trained, or None.

    Args:
        model: The model.
        config: The settings; None plans nothing.
        entries: All parameters.

    Raises:
        PolicyError: A pattern matches no parameter.
        PlanError: A pattern gives Muon a parameter that it cannot or should not update.
    """
    if config is None:
        return None
    trained = {entry.fqn: entry for entry in sorted(entries, key=lambda entry: entry.place) if entry.requires_grad}
    fused = {name: parts for pattern, parts in config.fused.items() for name in _matched([pattern], trained, "fused")}
    stacked = _matched(config.stacked, trained, "stacked")
    excluded = _matched(config.exclude, trained, "exclude")
    asked = {} if config.muon in ("auto", None) else _matched(_patterns(config.muon), trained, "muon")
    layouts: dict[tuple[int, bool], list[str]] = {}
    others: list[str] = []
    for fqn, entry in trained.items():
        owner, own = _owner_of(model, fqn)
        reason = _not_for_muon(model, entry, owner, own, is_stack=fqn in stacked)
        parts = fused.get(fqn, _FUSED.get(own, 1) if isinstance(owner, nn.MultiheadAttention) else 1)
        is_stack = fqn in stacked or (config.muon == "auto" and _is_stack(entry, owner))
        if fqn in asked and fqn not in excluded:
            _check_asked(entry, reason)
        elif config.muon != "auto" or fqn in excluded or reason:
            others.append(fqn)
            continue
        _check_layout(entry, parts, is_stack)
        layouts.setdefault((parts, is_stack), []).append(fqn)
    given = config.model_dump(mode="json")  # lists, as a plan that was read from JSON has
    settings = {name: given[name] for name in _MUON}
    groups = [
        _group("muon", names, {**settings, "parts": parts, "is_stack": is_stack})
        for (parts, is_stack), names in layouts.items()
    ]
    if others:
        groups.append(_group("adamw", others, given["adamw"]))
    return OptimizerPlan(groups=tuple(groups), bucket_bytes=config.bucket_mib * 2**20)


def _group(optimizer: Any, names: list[str], settings: Mapping[str, Any]) -> OptimizerGroup:
    return OptimizerGroup(optimizer=optimizer, fqns=tuple(names), settings=dict(settings))


def _patterns(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value


def _matched(patterns: Iterable[str], trained: Mapping[str, ParamEntry], setting: str) -> dict[str, str]:
    return match_fqns(patterns, trained, what="trained parameter", config=f"optimizer.{setting}")


def _owner_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    path, _, own = fqn.rpartition(".")
    return model.get_submodule(path), own


def _not_for_muon(model: nn.Module, entry: ParamEntry, owner: nn.Module, own: str, *, is_stack: bool) -> str:
    """Return why Muon should not update a parameter, or an empty string.

    Its authors advise it for the hidden layers: not for embeddings, the output layer, or tensors that are not matrices.
    """
    owners = [owner, *(_owner_of(model, alias)[0] for alias in entry.aliases)]
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in owners):
        return "an embedding, whose rows are used one at a time"
    if len(entry.shape) < 2:
        return "no matrix"
    if is_stack or _is_stack(entry, owner):
        return ""
    if isinstance(owner, _TRANSPOSED) or (isinstance(owner, _CONVOLUTIONS) and owner.groups > 1):
        return "a convolution in groups or a transposed one, whose filters are not rows of one matrix"
    if isinstance(owner, _CONVOLUTIONS):
        return "" if own == "weight" else "no matrix"
    path = entry.fqn.split(".")[:-1]
    last = path[-1] if path else ""
    if _is_output(model, owner, path):
        return "the output layer"
    if last in _ROUTERS:
        return "a router, whose rows decide for one expert each"
    if any("lora_" in part for part in path):
        return "a low-rank factor"
    if len(entry.shape) > 2:
        return "no matrix"
    is_weight = isinstance(owner, nn.Linear) or own == "weight" or own.endswith("_weight")
    return "" if is_weight and "norm" not in last and "embed" not in entry.fqn.lower() else "not known as a matrix"


def _is_output(model: nn.Module, owner: nn.Module, path: list[str]) -> bool:
    outputs = getattr(model, "get_output_embeddings", None)
    if callable(outputs) and outputs() is owner:
        return True
    # Within a repeated layer, fc is a hidden layer.
    return bool(path) and path[-1] in _OUTPUTS and not any(part.isdigit() for part in path)


def _is_stack(entry: ParamEntry, owner: nn.Module) -> bool:
    return (
        len(entry.shape) == 3
        and "expert" in entry.fqn.lower()
        and not isinstance(owner, (*_CONVOLUTIONS, *_TRANSPOSED))
    )


def _check_asked(entry: ParamEntry, reason: str) -> None:
    if reason.startswith(("an embedding", "no matrix", "a convolution")):
        raise PlanError(
            f"optimizer.muon selects {entry.fqn!r} of shape {entry.shape}, which is {reason}. List it in "
            "optimizer.exclude, or write a pattern that leaves it out; AdamW then updates it.",
            fqn=entry.fqn,
            config="optimizer.muon",
        )


def _check_layout(entry: ParamEntry, parts: int, is_stack: bool) -> None:
    if is_stack and len(entry.shape) < 3:
        raise PlanError(
            f"optimizer.stacked names {entry.fqn!r}, but a stack of matrices has at least 3 dimensions, and its shape "
            f"is {entry.shape}.",
            fqn=entry.fqn,
            config="optimizer.stacked",
        )
    if entry.shape[is_stack] % parts:
        raise PlanError(
            f"optimizer.fused divides {entry.fqn!r} of shape {entry.shape} into {parts} matrices, but its "
            f"{entry.shape[is_stack]} rows are no multiple of that.",
            fqn=entry.fqn,
            config="optimizer.fused",
        )
