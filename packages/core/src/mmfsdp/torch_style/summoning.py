"""`summon_full_params` with the arguments of torch's class: shows whole parameters of a model or of a part of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.nn as nn

from mmfsdp.runtime.engine import Showing
from mmfsdp.runtime.whole_params import whole_params_in
from mmfsdp.torch_style.sharded_modules import models_in, part_of

__all__ = ["summon_full_params"]


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show whole parameters, for reading and editing. Collective: every rank. See `mmfsdp.full_params`.

    Args:
        module: A sharded model, a module that holds one or several, or a part of one. A module without sharded
            parameters is left as it is.
        recurse: Show all parameters below ``module``. Otherwise only those that its unit holds itself.
        writeback: Keep changes; each rank keeps its own part of its own changes.
        rank0_only: Show whole parameters on the first rank only. Needs ``writeback=False``.
        offload_to_cpu: Show the parameters on the CPU.
        with_grads: Make the gradients whole, too.

    Raises:
        UnsupportedCallError: ``rank0_only`` with ``writeback``; or ``with_grads`` with flat parameters.
        ShardStateError: A forward or backward is running, or the parameters are shown whole already.
        LostRankError: Not all ranks called it.
    """
    how = Showing(recurse, writeback, rank0_only, offload_to_cpu, with_grads)
    with ExitStack() as stack:
        whole_models = models_in(module)
        for state in whole_models or part_of(module):
            # The wrapper is the root, as torch sees it.
            stack.enter_context(whole_params_in(state, state.module if whole_models else module, how))
        yield
