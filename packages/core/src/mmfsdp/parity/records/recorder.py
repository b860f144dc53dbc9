"""Records what a training loop computes, step by step, as sketches that do not depend on sharding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mmfsdp.errors import ConfigError
from mmfsdp.parity.records.activations import Batch, Order
from mmfsdp.parity.records.naming import units_of, unwrapped
from mmfsdp.parity.records.parameters import Parameters, optimizers_of
from mmfsdp.parity.records.step_record import StepRecord
from mmfsdp.parity.records.writing import Writer
from mmfsdp.planning.compiled import is_compiled

__all__ = ["Order", "Recording", "recording"]

_CLIP = "clip_grad_norm_"
_CLIPPERS = ("torch.nn.utils", "torch.nn.utils.clip_grad", "mmfsdp")
"""Modules in which loops look it up."""


@contextmanager
def recording(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    depth: int = 2,
    every: int = 1,
    order: Order = "blocks",
    perturb: int | None = None,
    first_step: int = 0,
    whole: Sequence[str] = (),
) -> Iterator[Recording]:
    """Record a training loop, for `mmfsdp.compare`. Call it on every rank; nothing is sent.

    A step ends when the optimizer steps, or the last one of several. The record holds, in the order of computation,
    the inputs and outputs of modules, the gradients of these outputs, the norm, the gradients of parameters before and
    after clipping, the numbers in the optimizer's groups, updates, the optimizer's state, parameters and buffers. A
    tensor takes about 600 bytes: sums, extremes, and a sketch that tells how far two tensors are apart. Each rank
    writes its own file. While the optimizer steps, the rank's part of the parameters is held twice.

    The model may be sharded by mmfsdp (engine ``fsdp2`` or ``replicate``) or by ``fully_shard``, wrapped by DDP, or
    plain. Only forwards of the whole model in training mode are recorded. Gradients before clipping and the norm are
    those that ``torch.nn.utils.clip_grad_norm_`` or ``mmfsdp.clip_grad_norm_``, called by these names, see.

    Args:
        folder: Where to write; files of an earlier recording are replaced.
        model: The model that is trained.
        optimizer: Its optimizer, made for the sharded parameters. Or several, as for a generator and a discriminator,
            in the order in which they step. One that steps more often within a step is recorded each time.
        depth: How many levels of modules to record below the model; containers such as ``ModuleList`` do not count.
        every: Record each step whose number it divides.
        order: Which samples of the global batch a rank gets: ``"blocks"`` of consecutive ones, or ``"strided"``, one
            of every ``world_size``, as ``DistributedSampler`` deals them out. Ranks must get equally many.
        perturb: None, or a seed: change each input by about one unit in the last place of its dtype. Such runs of the
            reference tell `mmfsdp.compare` how large differences may be.
        first_step: The number of the first step, of a run that resumes.
        whole: Patterns such as ``"gradient of head.*"`` and ``"output of layers.3*"``: each rank writes its part of
            such tensors whole, too, and `mmfsdp.compare` says which elements differ. Complex ones and, with
            ``order="strided"``, activations are not written whole.

    Yields:
        The recording: tell it the loss with ``loss(value)``.

    Raises:
        ConfigError: An argument has an unknown value.
    """
    if depth < 0 or every < 1 or order not in ("blocks", "strided"):
        raise ConfigError(
            f"recording() needs depth >= 0, every >= 1 and order 'blocks' or 'strided', got {depth=}, {every=}, "
            f"{order=}."
        )
    made = Recording(
        Path(folder), model, optimizer,
        depth=depth, every=every, order=order, perturb=perturb, step=first_step, whole=whole,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


class Recording:
    """A recording that runs; `recording` makes it."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        depth: int,
        every: int,
        order: Order,
        perturb: int | None,
        step: int,
        whole: Sequence[str] = (),
    ) -> None:
        self._model, self._every, self._whole = unwrapped(model), every, whole
        rank, world = self._rank_and_world()
        self._optimizers = optimizers_of(optimizer)
        head = {"world": world, "torch": torch.__version__, "every": every, "depth": depth, "perturbed": perturb}
        names = ", ".join(type(each).__name__ for each in self._optimizers)
        head |= {"model": type(self._model).__name__, "optimizer": names}
        self._record = StepRecord(self._make_writer(folder, rank, head), Batch(rank, world, order), step)
        is_flat = isinstance(model, FullyShardedDataParallel)
        self._params = Parameters(self._model, self._optimizers, self._record.slots, is_flat=is_flat)
        self._running = self._started = self._called = self._evaluating = False
        self._counts = True  # whether the step that runs is one of training
        with ExitStack() as hooks:
            if perturb is not None:
                hooks.enter_context(_perturb_inputs(self._model, perturb))
            # The import of the compiler takes seconds.
            hidden = torch.compiler.disable if any(map(is_compiled, self._model.modules())) else _itself
            for name, module in units_of(self._model, depth):
                before, after = map(hidden, self._hooks(name))
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            for each in self._optimizers:
                hooks.callback(each.register_step_pre_hook(partial(self._begin_update, each)).remove)
                hooks.callback(each.register_step_post_hook(partial(self._end_update, each)).remove)
            hooks.enter_context(_watch_clipping(self.before_clipping, self.norm))
            self._stack = hooks.pop_all()

    @property
    def stopped(self) -> str:
        """Why the recording has stopped before the loop, such as a full disk; empty if it has not."""
        return self._record.writer.stopped

    @property
    def not_finite(self) -> str:
        """The first tensor of this rank with infinite or NaN elements, known at the end of its step; else empty."""
        return self._record.writer.odd

    def loss(self, value: torch.Tensor | float) -> None:
        """Record this rank's loss; the mean over ranks counts. Not collective."""
        if self._is_on:
            self._record.add_number("loss", value, "mean")

    def norm(self, value: torch.Tensor | float) -> None:
        """Record the norm of all gradients, which is the same on all ranks. Not collective."""
        if self._is_on:
            self._record.add_number("norm", value, "alike")

    def close(self) -> None:
        """Remove the hooks, and write what is left."""
        self._stack.close()
        self._running = False
        self._record.writer.close()

    def _rank_and_world(self) -> tuple[int, int]:
        """Return this rank and the number of ranks."""
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _make_writer(self, folder: Path, rank: int, head: dict[str, Any]) -> Writer:
        return Writer(folder, rank, head, self._whole)

    @property
    def _is_on(self) -> bool:
        return self._record.step % self._every == 0 and not self._record.writer.stopped

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not name:
                self._begin(module, (args, kwargs))
            if self._running:
                self._record.add_activations("input", name, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._running or self._evaluating:
                self._record.add_activations("output" if self._running else "evaluation", name, output)
            if not name:
                self._running = False

        return before, after

    def _begin(self, module: nn.Module, given: Any) -> None:
        self._running = module.training and self._is_on
        self._called = True
        if self._running or self._evaluating:
            self._record.begin_forward(given)
        if not self._running:
            return
        if not self._started:
            self._started = True
            initial = [self._params.part("initial parameter", *item) for item in self._params.named()]
            self._record.add_boxes(initial)
        self._record.add_boxes(self._params.changed())

    @torch.no_grad()
    def before_clipping(self, optimizer: Optimizer | None = None) -> None:
        """Record gradients before a loop clips them in its own way. Not collective.

        Args:
            optimizer: The one whose gradients are clipped. Default: all.
        """
        if self._is_on:
            self._record.add_unclipped(self._params.gradients("gradient before clipping", optimizer))

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        # To save an optimizer that has no state yet, torch makes a step with learning rate 0.
        self._counts = self._called or any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)
        if self._counts:
            self._before_update(optimizer)

    def _end_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counts:
            self._after_update(optimizer)
        is_last = self._ends_step(optimizer)
        if self._counts and is_last:
            self._end_step()
        self._called = self._called and not is_last

    def _ends_step(self, optimizer: Optimizer) -> bool:
        return optimizer is self._optimizers[-1]

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer) -> None:
        if self._is_on:
            self._record.add_clipped(self._params.gradients("gradient", optimizer))
            self._record.add_boxes(self._params.settings(optimizer))
            self._params.keep(optimizer)

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer) -> None:
        if self._is_on:
            self._record.add_boxes(chain(self._params.after_step(optimizer), self._params.buffers()))
        self._params.forget()

    def _end_step(self) -> None:
        if self._is_on:
            if self._every == 1:
                self._params.remember()
            self._record.writer.flush()
        self._record.end()


def _itself(function: Callable[..., None]) -> Callable[..., None]:
    return function


@contextmanager
def _perturb_inputs(model: nn.Module, seed: int) -> Iterator[None]:
    """Multiply the inputs of a model by numbers around 1; of models that take only integers, the outputs of embeddings.

    The numbers do not come from torch's global generators, whose state stays as it is.

    Args:
        model: The model, without DDP around it.
        seed: Another seed gives other numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        dtype = torch.get_autocast_dtype(value.device.type) if _autocasts(value) else value.dtype
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
        return value * (1 + signs.to(torch.float64) * torch.finfo(dtype).eps).to(value.dtype)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(change, (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output)

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_hook(after).remove)
        yield


def _autocasts(value: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(value.device.type)


@contextmanager
def _watch_clipping(before: Callable[[], None], after: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call functions around ``clip_grad_norm_`` of torch and of mmfsdp, wherever a loop calls it by its full name.

    Args:
        before: Is called before gradients are scaled.
        after: Gets their norm.
    """
    inside = False

    def watched(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(clip)
        def clip_and_tell(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal inside
            if inside:  # ours may call torch's
                return clip(*args, **kwargs)
            inside = True
            try:
                before()
                norm = clip(*args, **kwargs)
                after(norm)
            finally:
                inside = False
            return norm

        return clip_and_tell

    replaced = []
    for name in _CLIPPERS:
        module = sys.modules.get(name)
        if module is not None and (clip := getattr(module, _CLIP, None)) is not None:
            setattr(module, _CLIP, watched(clip))
            replaced.append((module, clip))
    try:
        yield
    finally:
        for module, clip in reversed(replaced):
            setattr(module, _CLIP, clip)
