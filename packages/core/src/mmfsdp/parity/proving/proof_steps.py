"""Takes the steps of a run of a proof: of each part of the batch in turn, as ranks take them together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mmfsdp.parity.proving.proof_task import Task
from mmfsdp.parity.proving.threads_in_turn import PartOptimizer, Turns
from mmfsdp.parity.records.parts import PartedRecording
from mmfsdp.rehearsal.running.step import default_loss
from mmfsdp.runtime.gradients.clipping import global_norm
from mmfsdp.runtime.refusals.grad_scaler import GradScaler
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.training import clip_grad_norm_, no_sync

__all__ = ["ProofSteps"]

_SCALE = 128.0  # of losses in float16: small, as a step that overflows is skipped
_STEPS = 1 << 30  # after which the scale would grow


@dataclass
class ProofSteps:
    """The steps of a run, which is recorded."""

    task: Task
    module: nn.Module
    optimizers: Sequence[Optimizer]
    record: PartedRecording
    parts: int
    """How many parts of the batch this process computes."""
    is_sharded: bool
    ended: int
    """How many steps the record has: one for each of the optimizer, or of the task if there are several."""

    def __post_init__(self) -> None:
        is_half = self.task.config.precision.param_dtype == "float16"
        self._scaler = GradScaler(self.task.device, init_scale=_SCALE, growth_interval=_STEPS, enabled=is_half)

    def evaluate(self, step: int) -> None:
        """Evaluate the model with each part of a step's first batch, and record what its modules return.

        All parts use the first rank's buffers here, as checkpoints do, because buffers of batch norms differ.
        """
        assert self.task.training.evaluate is not None
        was_training = [module.training for module in self.module.modules()]
        self.module.eval()
        self.record.play(0)
        buffers = [*self.module.buffers()]
        with torch.no_grad(), self.record.evaluating():
            shared = [buffer.clone() for buffer in buffers]
            for buffer in shared if dist.get_world_size() > 1 else ():
                dist.broadcast(buffer, 0)
            for part in range(self.parts):
                self.record.play(part)
                own = [buffer.clone() for buffer in buffers]
                _copy(shared, buffers)
                self.task.training.evaluate(self.module, self._batch(step, 0, part))
                _copy(own, buffers)
        self.record.play(0)
        for module, training in zip(self.module.modules(), was_training, strict=True):
            module.training = training

    def step_of_losses(self, step: int) -> None:
        """Compute the loss of each part in turn, and update."""
        compute = self.task.training.loss or default_loss
        last = (self.task.training.accumulate - 1, self.parts - 1)
        for index, part in itertools.product(range(self.task.training.accumulate), range(self.parts)):
            self.record.play(part)
            batch = self._batch(step, index, part)
            with contextlib.nullcontext() if (index, part) == last else self._held():
                loss = compute(self.module, batch) / self.task.training.accumulate
                self.record.loss(loss)
                self._scaler.scale(loss).backward()
        self._average([*self.module.parameters()])
        for optimizer in self.optimizers:
            self._scaler.unscale_(optimizer)
        self.record.before_clipping()
        self.record.norm(self._clip(self.module, self.task.max_norm(0)))
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self._end()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def whole_step(self, step: int) -> None:
        """Take the task's own step for each part; they wait for each other where an optimizer steps."""
        held = contextlib.ExitStack()

        def play(part: int) -> None:
            self.record.play(part)
            held.close()
            if part < self.parts - 1:
                held.enter_context(self._held())

        turns = Turns(self.task.device, play)

        def take(part: int) -> None:
            views = []
            for index, optimizer in enumerate(self.optimizers):
                # The first part to compute anything zeroes the gradients, which the others add to.
                zero_grad = optimizer.zero_grad if part == 0 else lambda: None
                meet = partial(turns.meet, part, index, partial(self._update, index))
                views.append(PartOptimizer(optimizer, meet, zero_grad))
            given = views if len(views) > 1 else views[0]
            for index in range(self.task.training.accumulate):
                assert self.task.training.step is not None
                self.task.training.step(self.module, self._batch(step, index, part), given)

        turns.run([partial(take, part) for part in range(self.parts)])
        if len(self.optimizers) > 1:
            self._end()

    def _batch(self, step: int, index: int, part: int) -> Any:
        """Return a part's micro-batch, and begin its random numbers, which do not depend on where it is computed."""
        part += dist.get_rank() * self.parts
        batch = self.task.micro_batch(self.module, step, index, part)
        torch.manual_seed(1 + (step * self.task.training.accumulate + index) * self.task.parts + part)
        return batch

    def _update(self, index: int) -> None:
        """Average the gradients of an optimizer over all parts, clip them, and step it."""
        self.record.play(0)
        optimizer, is_one = self.optimizers[index], len(self.optimizers) == 1
        own = [param for group in optimizer.param_groups for param in group["params"]]
        self._average([*self.module.parameters()] if is_one else own)
        self.record.before_clipping(optimizer)
        self.record.norm(self._clip(self.module if is_one else own, self.task.max_norm(index)))
        optimizer.step()
        if is_one:
            self._end()

    def _end(self) -> None:
        """End a step of the record: one optimizer ends it itself."""
        self.ended += 1
        if len(self.optimizers) > 1:
            self.record.end_step()

    def _average(self, params: Sequence[torch.Tensor]) -> None:
        for grad in [param.grad for param in params if param.grad is not None and self.parts > 1]:
            grad.div_(self.parts)

    def _clip(self, params: nn.Module | Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        return clip_grad_norm_(params, max_norm) if self.is_sharded else _clip(params, max_norm)

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which gradients are not reduced."""
        if self.is_sharded:
            # On one rank torch's FSDP1 cannot accumulate gradients in low precision; nothing is sent there anyway.
            is_alone = dist.get_world_size() == 1 and find_sharded_model(self.module).is_fsdp1
            return contextlib.nullcontext() if is_alone else no_sync(self.module)
        module: Any = self.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def _copy(values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        if not torch.equal(value, target):  # a backward may need one that nothing changes
            target.copy_(value)


def _clip(given: nn.Module | Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients of a plain model by a name that the recording does not watch, as it has been told already."""
    params = [*given.parameters()] if isinstance(given, nn.Module) else given
    norm = global_norm(params, 2.0, None)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
