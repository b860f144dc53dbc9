"""Divides a module of stacked experts over ranks, and sends each token to the ranks of its experts and back.

The module is one whose ``forward(tokens, experts, weights)`` returns for each token the weighted sum of what its
experts make of it, as those of transformers do: ``tokens`` of shape (tokens, features), ``experts`` and ``weights`` of
shape (tokens, experts per token). Its parameters have one row per expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mmfsdp.errors import PlanError
from mmfsdp.planning.division.checks import check_experts

__all__ = ["divide_experts"]


def divide_experts(module: nn.Module, experts: DeviceMesh, tensor: DeviceMesh | None = None) -> None:
    """Divide a module of stacked experts in place, before its model is sharded. Not collective; its forward is.

    Each rank holds whole experts. Its tokens go to the ranks of their experts, and come back; a rank that gets no
    tokens still takes part in each exchange. The whole model is then sharded over two meshes:
    ``shard(model, config, (mesh, experts))``.

    Args:
        module: The experts, of equal values on every rank. Its ``forward(tokens, experts, weights)`` takes tensors of
            shape (tokens, features), (tokens, experts per token) and the same, and returns the weighted sums, of the
            shape of ``tokens``; its own parameters have one row per expert. So it is in transformers 5.
        experts: The part of the mesh of experts that divides them: ``experts["expert"]``.
        tensor: The ranks that share a batch, if several do, ``mesh["tensor"]``: each sends its part of the tokens.

    Raises:
        PlanError: The ranks cannot hold equal numbers of experts; or a parameter has other rows, or is divided already.
    """
    kind = type(module).__name__
    if divided := [name for name, param in module.named_parameters() if isinstance(param, DTensor)]:
        raise PlanError(f"{divided[0]!r} of {kind} is divided already: divide experts once.", fqn=divided[0])
    here = check_experts(module, experts.size(), kind)
    for name, param in [*module.named_parameters(recurse=False)]:
        part = distribute_tensor(param.detach(), experts, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))
    module.num_experts = here  # type: ignore[assignment]
    module.forward = _Dispatch(module, here, experts, tensor)


class _Dispatch:
    """The forward of divided experts."""

    def __init__(self, module: nn.Module, here: int, experts: DeviceMesh, tensor: DeviceMesh | None) -> None:
        self._module, self._forward, self._here = module, module.forward, here
        self._group, self._ranks = experts.get_group(), experts.size()
        self._tensor = tensor if tensor is not None and tensor.size() > 1 else None

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator] # what comes is counted on the host
    def __call__(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._tensor is None:
            return self._exchange(tokens, experts, weights)
        own = [_part(tensor, self._tensor) for tensor in (tokens, experts, weights)]
        return _joined(self._exchange(*own), self._tensor, tokens.shape)

    def _exchange(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = experts.shape[-1]
        order = experts.flatten().argsort(stable=True)  # by expert, so by rank
        here = self._here
        sent = torch.bincount(experts.flatten(), minlength=here * self._ranks).view(self._ranks, here)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        out, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        arrived = _exchanged(tokens[order // chosen], back, out, self._group)
        ids = torch.arange(here, device=tokens.device).repeat(self._ranks)
        ids = ids.repeat_interleave(received.flatten(), output_size=sum(back))
        returned = _exchanged(self._run(arrived, ids), out, back, self._group)
        answers = torch.zeros_like(returned).index_put((order,), returned)
        return (answers.view(*weights.shape, -1) * weights[..., None].to(answers.dtype)).sum(1)

    def _run(self, arrived: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if len(arrived):
            return self._call(arrived, ids)
        # A rank without tokens still uses its parameters, so that its backward has the collectives of the others.
        row = arrived.new_zeros((1, *arrived.shape[1:])) + arrived.sum(0)
        return self._call(row, ids.new_zeros(1))[:0]

    def _call(self, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Call the module's own forward with the part of its parameters that this rank holds."""
        module = self._module
        params = dict(module._parameters)
        try:
            for name, param in params.items():
                if isinstance(param, DTensor):
                    module._parameters[name] = param.to_local()
            ones = torch.ones(len(ids), 1, dtype=tokens.dtype, device=tokens.device)
            found: torch.Tensor = self._forward(tokens, ids[:, None], ones)
            return found
        finally:
            module._parameters.update(params)


class _AllToAll(torch.autograd.Function):
    """Rows of each rank for each other one: autograd sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received, sent = ctx.sizes
        found = grads[0].new_empty((sum(sent), *grads[0].shape[1:]))
        dist.all_to_all_single(found, grads[0].contiguous(), sent, received, group=ctx.group)
        return found, None, None, None


def _exchanged(rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
    found: torch.Tensor = _AllToAll.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return found


def _part(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a tensor that all ranks have; backward gathers the gradients of all rows."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


def _joined(rows: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> torch.Tensor:
    """Return the rows of all ranks; backward gives each rank the gradients of its own."""
    stride = (rows.shape[1], 1)
    return DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
