"""Prepares the weights of a unit before sharding: initialises, moves, casts and broadcasts them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.collective.broadcasting import broadcast_along, broadcast_tensor
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.scopes import rank_in
from mmfsdp.planning.distributed_params import divided_by
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.unit_parts import modules_by_unit
from mmfsdp.sharding.agreement import Agreement
from mmfsdp.sharding.devices import device_of
from mmfsdp.sharding.materialise import InitFn, Materialiser, own_tensors

__all__ = ["UnitPreparer"]

_LARGE = 1 << 20  # bytes of a unit that are worth giving back
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc only


class UnitPreparer:
    """Prepares one shard unit at a time, which never needs the memory of more than one whole unit.

    Collective when called: every rank of the mesh, in the plan's order.

    Args:
        model: The model, on any device.
        plan: The plan that will be applied.
        mesh: The mesh to shard over.
        param_init_fn: Initialises one module; see `Materialiser`.
        experts: The mesh of the same ranks that experts are divided over.

    Raises:
        PlanError: Weights on the meta device cannot be given the values that the unsharded model would have.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        param_init_fn: InitFn | None = None,
        experts: DeviceMesh | None = None,
    ) -> None:
        self._plan, self._mesh, self._experts = plan, mesh, experts
        self._device = device_of(mesh)
        self._owned = modules_by_unit(model, plan)
        ignored = {id(model.get_parameter(param.fqn)) for param in plan.ignored_params}
        received = plan.sync_states and rank_in(mesh) > 0
        self._meta = Materialiser(model, self._device, plan.seed, ignored, param_init_fn, received=received)

    def __call__(self, unit: ShardUnit, agreed: Agreement) -> None:
        """Prepare the parameters and buffers of ``unit``.

        Args:
            unit: A unit of the plan.
            agreed: Reports the failure of one rank, such as a lack of memory, to the others.
        """
        tensors = agreed(lambda: self._make(unit))
        if self._plan.sync_states:
            with naming_lost_ranks("weights were sent from the first rank"):
                self._broadcast(tensors)
        self._meta.release_sharded()

    def alone(self, unit: ShardUnit) -> None:
        """Prepare the parameters and buffers of ``unit`` on this rank. Not collective; nothing is broadcast."""
        self._make(unit)
        self._meta.release_sharded()

    def _make(self, unit: ShardUnit) -> list[torch.Tensor]:
        """Make, move and cast the tensors of ``unit``, and return them."""
        if self._device.type == "cpu" and unit.nbytes >= _LARGE:
            _give_back_freed_memory()
        modules = self._owned[unit.fqns]
        self._meta.make(modules)
        tensors = [tensor for _, module in modules for _, tensor in own_tensors(module)]
        self._place(tensors, unit)
        return tensors

    def _place(self, tensors: Iterable[torch.Tensor], unit: ShardUnit) -> None:
        storage = self._plan.storage_dtype
        buffer_dtype = None if unit.precision.full_precision else self._plan.buffer_dtype
        for tensor in tensors:
            dtype = storage if isinstance(tensor, nn.Parameter) else buffer_dtype
            wanted = to_torch(dtype) if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if tensor.device != self._device or tensor.dtype != wanted or not tensor.is_contiguous():
                tensor.data = tensor.data.to(self._device, wanted).contiguous()

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast from the first of the ranks that hold the same, one dimension at a time; tied tensors once."""
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if not isinstance(tensor, DTensor):
                broadcast_tensor(tensor, self._mesh)
                continue
            is_divided = not all(placement.is_replicate() for placement in tensor.placements)
            apart = set(tensor.device_mesh.mesh.flatten().tolist()) if is_divided else set()
            has_experts = "expert" in dict(divided_by(tensor))
            mesh = self._experts if has_experts and self._experts is not None else self._mesh
            for dim in reversed(range(mesh.ndim)):
                if len(apart & {*dist.get_process_group_ranks(mesh.get_group(dim))}) <= 1:
                    broadcast_along(tensor.to_local(), mesh, dim, 0)


def _give_back_freed_memory() -> None:
    """Make the C library return memory that the previous unit has freed.

    glibc keeps holes below 32 MiB in its heap, and a small allocation inside one makes the next unit take new memory.
    Sharding a model of 384 MiB on 4 ranks needs 360 MB more without this call, and 140 MB more with it.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
