"""Takes down what one rank computes in a step: activations and their gradients, numbers, and boxes of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.parity.records.activations import Batch, leaves_of
from mmfsdp.parity.records.record_files import Spread
from mmfsdp.parity.records.slots import Placed, Slots
from mmfsdp.parity.records.writing import Part, Writer

__all__ = ["StepRecord"]


class StepRecord:
    """What one rank records of the step that runs. Nothing is collective.

    Args:
        writer: Writes the rank's file.
        batch: The rank's part of the global batch.
        step: The number of the first step.
    """

    def __init__(self, writer: Writer, batch: Batch, step: int) -> None:
        self.writer, self.slots, self.step = writer, Slots(), step
        self._batch = batch

    @property
    def rank(self) -> int:
        """The rank that the file is of."""
        return self._batch.rank

    def begin_forward(self, given: Any) -> None:
        """Take the number of samples from the arguments of the model."""
        self._batch.begin(given)
        self.slots.begin_forward(self._batch.samples)

    def add_activations(self, kind: str, module: str, tree: Any) -> None:
        """Record the tensors that a module gets or returns, and the gradients of outputs once they are known.

        Args:
            kind: "input", "output" or "evaluation".
            module: The module's name.
            tree: Its arguments or its result.
        """
        for path, leaf in leaves_of(tree):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or leaf.layout != torch.strided:
                continue
            if kind == "evaluation" and not leaf.is_floating_point():  # the largest of two may be another by rounding
                continue
            name = module + path
            call = self.slots.count(kind, name)
            self._add(kind, name, call, leaf)
            if kind == "output" and leaf.requires_grad:
                leaf.register_hook(partial(self._add_gradient, self.step, name, call))

    def add_number(self, kind: str, value: torch.Tensor | float, spread: Spread) -> None:
        """Record a number, such as the loss."""
        number = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        number = number.full_tensor() if isinstance(number, DTensor) else number
        placed = partial(Placed, spread, (0,) * number.dim(), tuple(number.shape))
        slot = self.slots.find(kind, "", self.slots.count(kind, ""), number, placed)
        self.writer.add(self.step, slot, number)

    def add_boxes(self, parts: Iterable[Part]) -> None:
        """Record boxes of tensors."""
        self.writer.add_boxes(self.step, parts)

    def add_unclipped(self, gradients: Sequence[Part]) -> None:
        """Record gradients that may be clipped next."""
        self.writer.add_unclipped(self.step, gradients)

    def add_clipped(self, gradients: Sequence[Part]) -> None:
        """Record gradients as the optimizer gets them."""
        self.writer.add_clipped(self.step, gradients)

    def end(self) -> None:
        """Begin the next step; who recorded this one has called ``writer.flush()``."""
        self.slots.end_step()
        self.step += 1

    def _add_gradient(self, step: int, name: str, call: int, grad: torch.Tensor) -> None:
        if step == self.step and not isinstance(grad, DTensor):
            self._add("gradient of output", name, call, grad)

    def _add(self, kind: str, name: str, call: int, value: torch.Tensor) -> None:
        local = self._batch.part(value)
        slot = self.slots.find(kind, name, call, local, partial(self._batch.placed, value))
        self.writer.add(self.step, slot, local)
