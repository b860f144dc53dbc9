"""One interface to the engines while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.runtime.fsdp1.flat_params import free_flat_params
from mmfsdp.runtime.torch_fsdp2.gathering import shard_versions
from mmfsdp.runtime.torch_fsdp2.iterations import begin_root, discard_iteration
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["LiveEngine", "live_engine"]

_OPEN_NO_SYNC = "_mmfsdp_open_no_sync"


class LiveEngine(Protocol):
    """How one sharded model trains. Each method takes the sharded root; none is collective unless it says so."""

    is_flat: bool
    """Whether parameters are pieces of flat parameters, which no rank can tell apart; otherwise they are DTensors."""

    def begin_forward(self, module: nn.Module) -> None:
        """Prepare the root for a forward under ``inference_mode()``."""
        ...

    def set_sync(self, module: nn.Module, sync: bool) -> None:
        """Make the backward of the coming forward reduce gradients or not."""
        ...

    def keep_evaluated(self, groups: Sequence[Group]) -> int | None:
        """Return what tells whether shards were written since an evaluation that left units gathered.

        None if nothing may stay gathered.
        """
        ...

    def discard_forward(self, module: nn.Module, groups: Sequence[Group]) -> None:
        """Make training possible after a forward that raised."""
        ...

    def free(self, module: nn.Module, groups: Sequence[Group]) -> None:
        """Free all gathered parameters."""
        ...

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip flat parameters, and return the norm. Collective. None if gradients are clipped like any other's."""
        ...


class _Fsdp2:
    is_flat = False

    def __init__(self) -> None:
        self._synced = True

    def begin_forward(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        begin_root(module)

    def set_sync(self, module: nn.Module, sync: bool) -> None:
        assert isinstance(module, FSDPModule)
        if sync != self._synced:  # otherwise what the user has set stays
            module.set_requires_gradient_sync(sync)
        self._synced = sync

    def keep_evaluated(self, groups: Sequence[Group]) -> int | None:
        return shard_versions(groups)

    def discard_forward(self, module: nn.Module, groups: Sequence[Group]) -> None:
        assert isinstance(module, FSDPModule)
        discard_iteration(module)
        self.free(module, groups)

    def free(self, module: nn.Module, groups: Sequence[Group]) -> None:
        for group in groups:
            group.reshard()

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor | None:
        return None


class _Fsdp1:
    is_flat = True

    def begin_forward(self, module: nn.Module) -> None:
        pass

    def set_sync(self, module: nn.Module, sync: bool) -> None:
        if sync and _OPEN_NO_SYNC in vars(module):
            vars(module).pop(_OPEN_NO_SYNC).__exit__(None, None, None)
        elif not sync and _OPEN_NO_SYNC not in vars(module) and isinstance(module, FullyShardedDataParallel):
            # FSDP1 reads its flag in backward, which may run after the user's no_sync() block: the context stays
            # open until a forward outside of it. It references the module, so only the module may reference it.
            vars(module)[_OPEN_NO_SYNC] = context = FullyShardedDataParallel.no_sync(module)
            context.__enter__()

    def keep_evaluated(self, groups: Sequence[Group]) -> int | None:
        return None  # gathering changes its parameters themselves

    def discard_forward(self, module: nn.Module, groups: Sequence[Group]) -> None:
        pass

    def free(self, module: nn.Module, groups: Sequence[Group]) -> None:
        free_flat_params(module)

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor | None:
        assert isinstance(module, FullyShardedDataParallel)
        with Waiting("computing the norm of all gradients"):
            # By class: a wrapper's own method of this name ends here.
            return FullyShardedDataParallel.clip_grad_norm_(module, max_norm, norm_type)


def live_engine(name: str) -> LiveEngine:
    """Return what trains a model that was sharded by the engine of this name."""
    return _Fsdp1() if name == "fsdp1" else _Fsdp2()
