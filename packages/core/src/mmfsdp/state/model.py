"""Converts a sharded model's weights to plain or sharded state dicts, and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.collective.broadcasting import broadcast_tensor
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import rank_in
from mmfsdp.collective.steps import any_of, broadcast_object, on_all_ranks, share_page_cache
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import Box, box_of, whole_tensor
from mmfsdp.runtime.fsdp1.flat_params import FlatPiece
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.state.alike import kind_of
from mmfsdp.state.extra_states import is_extra, load_extra_states
from mmfsdp.state.flat_load import fill_piece, load_by_torch, piece_box
from mmfsdp.state.lazy_tensors import LazyTensor, check_unchanged, local_value, locate, whole_box, whole_value
from mmfsdp.state.replicas import Replicas, replicas_of
from mmfsdp.state.report import LoadReport, agree, compare_shapes
from mmfsdp.state.restored_codes import as_numbers
from mmfsdp.state.sending import check_whole

__all__ = ["LoadReport", "load_model_state_dict", "model_state_dict"]

Kind = Literal["full", "sharded"]
_Offer = tuple[tuple[int, ...] | None, str]


def model_state_dict(
    model: nn.Module, kind: Kind = "full", *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return the model's parameters and persistent buffers under the unsharded model's keys. Collective: every rank.

    Args:
        model: A sharded model.
        kind: ``full``: whole tensors. ``sharded``: DTensors with each rank's own part.
        rank0_only: For ``full``: only the mesh's first rank gets the tensors. The others get an empty dict, and never
            hold the whole model.
        cpu_offload: For ``full``: return CPU tensors.

    Returns:
        A new dict. With ``full`` its tensors share no memory with the model.

    Raises:
        StateDictError: ``kind`` is unknown; or, with engine ``fsdp1``, a shard unit has an extra state of its own.
    """
    state = find_sharded_model(model)
    if kind not in ("full", "sharded"):
        raise StateDictError(f"kind must be 'full' or 'sharded', got {kind!r}.")
    sharded = state.engine.weights(state)
    if kind == "sharded":
        return sharded
    keep = not rank0_only or is_first_rank(state)
    with Waiting("gathering a state dict"):
        gathered = {name: whole(value, keep, cpu_offload) for name, value in sharded.items()}
    return gathered if keep else {}


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    from_rank0: bool = False,
    read_once: bool = False,
) -> LoadReport:
    """Load weights into a sharded model; each rank loads its own part. Collective: every rank.

    With ``strict`` nothing is changed unless everything fits. Otherwise everything that fits is loaded. Weights that
    are codes of 8 bits with scales beside them are restored, unless the model holds the same codes.

    Args:
        model: A sharded model.
        state_dict: Tensors under the unsharded model's keys: whole ones (of memory-mapped or lazy ones a rank reads
            only its part), or DTensors placed as the model's own. Not changed.
        strict: Raise on every rank if a key is missing or unexpected, or a shape differs.
        from_rank0: Use only the ``state_dict`` of the mesh's first rank, which is sent tensor by tensor.
        read_once: Where several ranks hold the same part, let one of them read it and send it to the others. It
            applies to lazy tensors and the engines ``fsdp2`` and ``replicate``. Ranks that train on the CPUs of one
            host read files of its disks each for itself: the page cache gives them what the disk has read once.

    Returns:
        The keys and shapes that did not match; the same on every rank.

    Raises:
        StateDictError: With ``strict``, a key or a shape did not match; or, with ``from_rank0``, a tensor is a shard;
            or weights are codes that cannot be restored.
    """
    state = find_sharded_model(model)
    scope = state.scope
    if from_rank0 and not scope.is_first:
        state_dict = {}
    state_dict, given = on_all_ranks(lambda: _examined(state_dict, state, from_rank0), scope)
    extra = given.extra
    target = state.engine.targets(state, None if from_rank0 else given.kinds)
    by_torch = target is None
    if target is None:
        target = state.engine.weights(state)
    offered = broadcast_object(scope, given.offers) if from_rank0 else given.offers
    shapes = {name: _shape(name, into) for name, into in target.items()}
    found = compare_shapes(shapes, {name: shape for name, (shape, _) in offered.items()})
    report = agree(found, type(state.module).__name__, scope, strict=strict)
    names = [name for name, shape in shapes.items() if shape is not None and offered.get(name, (None,))[0] == shape]
    if from_rank0:
        _fill_from_first(names, state_dict, offered, target, state)
    else:
        wanted = names if by_torch else on_all_ranks(lambda: _without_twins(names, state_dict, state), scope)
        stored = [name for name in wanted if name in given.stored]
        replicas = {}
        if read_once and not by_torch and not _reading_beats_sending(stored, state_dict, state):
            replicas = _replicas(stored, target, state)
        mine = [name for name in wanted if name not in replicas or replicas[name].reads]
        boxes = {name: _held(target[name]) for name in mine}
        whole_extra = [(value, whole_box(value)) for value in extra.values() if isinstance(value, LazyTensor)]
        locate([*((given.stored[name], boxes.get(name)) for name in stored), *whole_extra], scope)
        if by_torch:
            load_by_torch(state, names, state_dict, target)
        else:

            def fill() -> None:
                for name, box in boxes.items():
                    _fill(target[name], state_dict[name], box)
                check_unchanged(given.stored[name] for name in mine if name in given.stored)

            on_all_ranks(fill, scope)  # a disk may fail on one rank
            for name, sharers in replicas.items():
                sharers.send(_local(target[name]))
    load_extra_states(state, extra, from_rank0=from_rank0)
    return report


@dataclass(frozen=True, slots=True)
class _Given:
    """The content of one rank's state dict, found in one pass: reading it may fail, or make each tensor anew."""

    offers: dict[str, _Offer]
    """Shape and dtype by key; None and an empty string for values that are not tensors."""
    kinds: dict[str, str]
    """Whether a value is whole or a shard, by key."""
    extra: dict[str, Any]
    """Extra states of modules."""
    stored: dict[str, LazyTensor]
    """Tensors that are still to be read."""


def _examined(state_dict: Any, state: ShardedModel, from_rank0: bool) -> tuple[Mapping[str, Any], _Given]:
    """Return the state dict with numbers in place of codes, and a summary of its entries."""
    _check_form(state_dict, from_rank0)
    state_dict = as_numbers(state_dict, state)
    given = _Given({}, {}, {}, {})
    for name, value in state_dict.items():
        if from_rank0:
            check_whole(name, value)
        given.offers[name] = (_shape(name, value), _dtype(value))
        given.kinds[name] = kind_of(value, tells_shards=True)
        if is_extra(name):
            given.extra[name] = value
        if isinstance(value, LazyTensor):
            given.stored[name] = value
    return state_dict, given


def _check_form(state_dict: Any, from_rank0: bool) -> None:
    if not isinstance(state_dict, Mapping):
        raise StateDictError(
            f"A state dict must be a mapping of names to tensors, got a {type(state_dict).__name__}. If only the first "
            "rank has read it, pass from_rank0=True on every rank."
        )


def whole(value: Any, keep: bool = True, cpu_offload: bool = True) -> Any:
    """Return a value whole, or None on ranks that do not keep it. Collective for DTensors: every rank."""
    if not isinstance(value, torch.Tensor):
        return value if keep else None
    tensor = whole_tensor(value, cpu_offload=cpu_offload and keep)
    return tensor if keep else None


def is_first_rank(state: ShardedModel) -> bool:
    """Return whether this rank is the first of the model's mesh."""
    return rank_in(state.mesh) == 0


@torch.no_grad()
def _fill(into: torch.Tensor | FlatPiece, value: Any, box: Box | None = None) -> None:
    if isinstance(into, FlatPiece):
        fill_piece(into, value)
    elif isinstance(value, LazyTensor):
        value.read_into(_local(into), box or box_of(into))
    else:
        _local(into).copy_(local_value(value, into))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replicas(stored: list[str], target: Mapping[str, Any], state: ShardedModel) -> dict[str, Replicas]:
    """Return, by name, the ranks that share the parts of the model that several ranks hold."""
    tensors = [name for name in stored if isinstance(target[name], torch.Tensor)]
    found = {name: replicas_of(target[name], state.mesh, number) for number, name in enumerate(tensors)}
    return {name: replicas for name, replicas in found.items() if replicas.reader}


def _reading_beats_sending(stored: list[str], state_dict: Mapping[str, Any], state: ShardedModel) -> bool:
    """Tell whether all ranks can copy what they hold from one page cache, over which no link on the CPU is faster.

    Collective: every rank.
    """
    if state.mesh.device_type != "cpu" or not all(state_dict[name].source.is_local for name in stored):
        return False
    return share_page_cache(state.scope)


def _without_twins(names: list[str], state_dict: Mapping[str, Any], state: ShardedModel) -> list[str]:
    """Return the names without those that are tied to another one with the same value."""
    first = {alias: param.fqn for param in state.plan.all_params() for alias in param.aliases}
    given = {name: state_dict[name] for name in names}
    return [name for name, value in given.items() if name not in first or given.get(first[name]) is not value]


def _held(into: torch.Tensor | FlatPiece) -> Box:
    """Return the box that this rank reads to fill its part."""
    return piece_box(into) if isinstance(into, FlatPiece) else box_of(into)


def _fill_from_first(
    names: list[str], state_dict: Mapping[str, Any], offered: Mapping[str, _Offer], target: Any, state: ShardedModel
) -> None:
    """Fill every target with the values of the mesh's first rank. Collective: every rank.

    Before each tensor the ranks agree that none has failed, so no rank waits for one that has.
    """
    scope, failure = state.scope, None
    for name in names:
        into = target[name].target if isinstance(target[name], FlatPiece) else target[name]
        device = into.device if into.device.type != "meta" else torch.device("cpu")
        value = None
        try:
            if scope.is_first:
                value = whole_value(state_dict[name]).detach().to(device).contiguous()
            elif failure is None:
                shape, dtype = offered[name]
                value = torch.empty(shape or (), dtype=getattr(torch, dtype), device=device)
        except Exception as error:
            failure = error
        if any_of(scope, failure is not None):
            break
        assert value is not None
        broadcast_tensor(value, state.mesh)
        try:
            _fill(target[name], value)
        except Exception as error:
            failure = error

    def tell() -> None:
        if failure is not None:
            raise failure

    on_all_ranks(tell, scope)


def _shape(name: str, value: Any) -> tuple[int, ...] | None:
    """Return the shape that a value must have; None if it may have any, or is not a tensor."""
    is_tensor = isinstance(value, (torch.Tensor, LazyTensor, FlatPiece)) and not is_extra(name)
    return tuple(value.shape) if is_tensor else None


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")
