"""Refuses a backward with ``create_graph=True`` through a shard unit: its graph would need weights that are freed."""

from __future__ import annotations

import torch

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, name_of

__all__ = ["RefuseSecondOrder"]


class RefuseSecondOrder(Subscriber):
    """Raises in a backward with ``create_graph=True`` that reaches a unit.

    A unit is gathered for its backward and freed right after it. The backward of that backward reads the weights again,
    at a point where torch has no hook: it fails, or ends the process.
    """

    turn = Turn.REFUSING

    def before_backward(self, group: Group) -> None:
        """Raise if gradients are recorded.

        Raises:
            ShardStateError: The backward records gradients.
        """
        if torch.is_grad_enabled():  # in a backward only with create_graph
            raise ShardStateError(
                f"A backward with create_graph=True, as in a gradient penalty, reached the shard unit "
                f"{name_of(group)!r}: the weights are freed after it, and the second backward would read them. Keep "
                "the modules whole that are differentiated twice: list them in sharding.ignored_modules. Their "
                "gradients are averaged over ranks."
            )
