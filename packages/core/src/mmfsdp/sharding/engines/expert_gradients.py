"""Has torch divide the gradients of experts by the number of ranks whose tokens reach them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mmfsdp.errors import PlanError

__all__ = ["ExpertGradients"]


class ExpertGradients:
    """Sets the divisor of units of experts.

    torch divides by the ranks that it reduces over, and those of the axis ``expert`` are not among them. Another
    divisor is a scaled sum, which gloo has not and NCCL makes zeros of in bfloat16 (pytorch #190747), or a plain sum,
    which some releases divide twice if nothing is scattered. So the first unit of each dtype tries on a parameter of
    its own which of the two is right here.

    Args:
        mesh: The ranks that experts are sharded over.
        ranks: The number of ranks with tokens of their own.
    """

    def __init__(self, mesh: DeviceMesh, ranks: int) -> None:
        self._mesh, self._ranks = mesh, ranks
        self._sums: dict[Hashable, bool] = {}

    def __call__(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Set the divisor of a unit that was just sharded. Collective for the first of a policy.

        Raises:
            PlanError: This torch cannot divide gradients of this dtype by it; raised on every rank.
        """
        key = policy.param_dtype, policy.reduce_dtype
        if key not in self._sums:
            right = [sums for sums in (True, False) if self._is_right(policy, sums)]
            if not right:
                raise PlanError(
                    f"torch {torch.__version__} cannot reduce gradients of experts in {policy.reduce_dtype} over "
                    f"{self._mesh.size()} ranks and divide them by {self._ranks}. Set precision.reduce_dtype to "
                    "float32.",
                    fqn="",
                )
            self._sums[key] = right[0]
        self._set(module, self._sums[key])

    def _is_right(self, policy: MixedPrecisionPolicy, sums: bool) -> bool:
        probe = _Probe(torch.ones(self._mesh.size(), device=self._mesh.device_type))
        fully_shard(probe, mesh=self._mesh, mp_policy=policy)
        self._set(probe, sums)
        try:
            with torch.enable_grad():
                probe().backward()
        except RuntimeError:  # the backend lacks the operation, on every rank
            return False
        grad = probe.weight.grad.to_local()  # type: ignore[union-attr]
        return bool(((grad * self._ranks - self._mesh.size()).abs() < 0.05 * self._mesh.size()).all())

    def _set(self, module: nn.Module, sums: bool) -> None:
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(float(self._ranks))
        if sums:
            module.set_force_sum_reduction_for_comms(True)


class _Probe(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> torch.Tensor:
        return self.weight.sum()
