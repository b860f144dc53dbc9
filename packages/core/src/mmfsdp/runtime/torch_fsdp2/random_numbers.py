"""Draws random numbers for shards in CPU memory as for whole tensors: they do not depend on the number of ranks.

On accelerators DTensor advances its generator by the offset of each shard. It has no such generator for the CPU: with
one seed, every rank would fill its shard with the same numbers, and a weight would consist of copies. torch offers no
public way to change that, so this module adds handlers to DTensor's dispatcher.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.runtime.dtensors import box_of, is_box

__all__ = ["draw_as_whole"]

_aten = torch.ops.aten
_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_NEW = (
    _aten.bernoulli.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
# DTensor raises NotImplementedError for all others, such as exponential_ and random_.

_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
_lock = threading.RLock()


def draw_as_whole(*meshes: DeviceMesh) -> None:
    """Make shards on some meshes whose memory is the CPU's get the random numbers of the whole tensor. Not collective.

    Each rank draws the numbers of the whole tensor and keeps its part, so ranks with equal generators get the values
    of a single process. It takes the memory of one whole tensor while it draws.

    Args:
        *meshes: The meshes of a sharded model. Tensors on other meshes are left to torch.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    with _lock:
        _meshes.update(meshes)
        for op in (*_IN_PLACE, *_NEW):
            handlers.setdefault(op, _draw)


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if not isinstance(tensor, DTensor) or not _needs_whole(tensor):
        return _as_torch_does(op, args, kwargs)
    local, box = tensor._local_tensor, box_of(tensor).slices
    whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    if op in _IN_PLACE:
        local.copy_(op(whole, *rest, **kwargs)[box])
        return tensor
    if op is _aten.bernoulli.default:
        whole[box] = local  # the probabilities; each element takes one number, whatever its probability
    part = op(whole, *rest, **kwargs)[box].contiguous()
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _needs_whole(tensor: DTensor) -> bool:
    return tensor._local_tensor.device.type == "cpu" and tensor.device_mesh in _meshes and is_box(tensor)


def _as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    with _lock:
        del handlers[op]
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = _draw
