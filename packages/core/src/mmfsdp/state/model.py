"""A sharded model's weights as plain or sharded state dicts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from mmfsdp.collective import gather_objects, scope_of
from mmfsdp.errors import StateDictError
from mmfsdp.runtime import ShardedModel, sharded_model
from mmfsdp.state.boxes import whole_tensor
from mmfsdp.state.stored import StoredTensor, local_value, whole_value

__all__ = ["LoadReport", "load_model_state_dict", "model_state_dict"]

Kind = Literal["full", "sharded"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a state dict and a model did not have in common; the same on every rank."""

    missing: tuple[str, ...] = ()
    """FQNs that the model has and the state dict has not."""
    unexpected: tuple[str, ...] = ()
    """Keys that the state dict has and the model has not."""
    mismatched: tuple[str, ...] = ()
    """FQNs whose shapes differ, with both shapes."""

    @property
    def missing_keys(self) -> list[str]:
        """`missing`, under the name that torch's ``load_state_dict`` gives it."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """`unexpected`, under the name that torch's ``load_state_dict`` gives it."""
        return list(self.unexpected)

    @property
    def clean(self) -> bool:
        """Whether everything matched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {word}: {', '.join(names[:5])}" + (" ..." if len(names) > 5 else "")
            for word, names in (("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", self.mismatched))
            if names
        ]
        return "; ".join(parts) or "all keys match"


def model_state_dict(
    model: nn.Module, kind: Kind = "full", *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return the model's parameters and persistent buffers under the unsharded model's keys. Collective: every rank.

    Args:
        model: A sharded model.
        kind: ``full``: whole tensors. ``sharded``: DTensors, each rank's own part, for torch's DCP or a rank file.
        rank0_only: For ``full``: other ranks than the mesh's first get an empty dict, and never hold the model.
        cpu_offload: For ``full``: return CPU tensors.

    Returns:
        A new dict; its tensors share no memory with the model when ``kind`` is ``full``.
    """
    state = sharded_model(model)
    if kind not in ("full", "sharded"):
        raise StateDictError(f"kind is 'full' or 'sharded', got {kind!r}.")
    sharded = _sharded(state)
    if kind == "sharded":
        return sharded
    keep = not rank0_only or is_first_rank(state)
    return {name: value for name, tensor in sharded.items() if (value := whole(tensor, keep, cpu_offload)) is not None}


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    from_rank0: bool = False,
) -> LoadReport:
    """Load weights into a sharded model, each rank its own part. Collective: every rank.

    Nothing is changed unless everything fits (with ``strict``), or what fits is loaded (without).

    Args:
        model: A sharded model.
        state_dict: Whole tensors (memory-mapped ones are read only where this rank needs them), or DTensors of the
            model's own placement, under the unsharded model's keys. Not changed.
        strict: Raise on every rank if any key is missing or unexpected, or any shape differs.
        from_rank0: Only the mesh's first rank's ``state_dict`` counts; it is sent tensor by tensor.

    Returns:
        What did not match; the same on every rank.

    Raises:
        StateDictError: With ``strict``, something did not match.
    """
    state = sharded_model(model)
    target = _sharded(state)
    offered = _offered(state_dict, state, from_rank0)
    report = _compare(target, offered)
    if strict and not report.clean:
        raise StateDictError(f"The state dict does not fit {type(state.module).__name__}: {report}.")
    skip = {text.split(":")[0] for text in report.mismatched}
    names = [name for name in target if name in offered and name not in skip]
    if state.is_fsdp1:
        source = {name: whole_value(fetch(name, state_dict, offered, target[name], state, from_rank0)) for name in names}
        _load_fsdp1(state, source)
        return report
    with torch.no_grad():
        for name in names:
            value = fetch(name, state_dict, offered, target[name], state, from_rank0)
            into = target[name]
            local = into.to_local() if isinstance(into, DTensor) else into
            local.copy_(local_value(value, into))
    return report


def whole(value: Any, keep: bool = True, cpu_offload: bool = True) -> Any:
    """Return the whole of a possibly sharded value, or None where it is not kept. Collective for DTensors."""
    if not isinstance(value, torch.Tensor):
        return value if keep else None
    tensor = whole_tensor(value, cpu_offload=cpu_offload and keep)
    return tensor if keep else None


def is_first_rank(state: ShardedModel) -> bool:
    """Tell whether this rank is the first of the model's mesh."""
    coordinate = state.mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def fetch(
    name: str,
    state_dict: Mapping[str, Any],
    offered: Mapping[str, tuple[tuple[int, ...], str]],
    like: torch.Tensor,
    state: ShardedModel,
    from_rank0: bool,
) -> Any:
    """Return the offered value, sent from the mesh's first rank if only that has it. Collective if so."""
    if not from_rank0:
        return state_dict[name]
    shape, dtype = offered[name]
    device = like.device if like.device.type != "meta" else torch.device("cpu")
    value = (
        whole_value(state_dict[name]).detach().to(device).contiguous()
        if is_first_rank(state)
        else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    )
    send_from_first(value, state)
    return value


def send_from_first(value: torch.Tensor, state: ShardedModel) -> None:
    """Broadcast from the mesh's first rank, in place. Collective: every rank."""
    for dim in reversed(range(state.mesh.ndim)):
        group = state.mesh.get_group(dim)
        dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)


def _sharded(state: ShardedModel) -> dict[str, Any]:
    state.reshard()
    if not state.is_fsdp1:
        return dict(state.module.state_dict())
    return dict(get_model_state_dict(state.module))


def _load_fsdp1(state: ShardedModel, source: dict[str, Any]) -> None:
    full = {name: value for name, value in source.items() if not isinstance(value, DTensor)}
    sharded = {name: value for name, value in source.items() if isinstance(value, DTensor)}
    for values, is_full in ((full, True), (sharded, False)):
        if values:
            set_model_state_dict(state.module, values, options=StateDictOptions(full_state_dict=is_full, strict=False))


def _offered(
    state_dict: Mapping[str, Any], state: ShardedModel, from_rank0: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    mine = {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in state_dict.items()
        if isinstance(value, (torch.Tensor, StoredTensor))
    }
    if not from_rank0:
        return mine
    return gather_objects(scope_of(state.mesh), mine if is_first_rank(state) else {})[0]


def _compare(target: Mapping[str, torch.Tensor], offered: Mapping[str, tuple[tuple[int, ...], str]]) -> LoadReport:
    return LoadReport(
        missing=tuple(name for name in target if name not in offered),
        unexpected=tuple(name for name in offered if name not in target),
        mismatched=tuple(
            f"{name}: {offered[name][0]} in the state dict, {tuple(tensor.shape)} in the model"
            for name, tensor in target.items()
            if name in offered and offered[name][0] != tuple(tensor.shape)
        ),
    )
