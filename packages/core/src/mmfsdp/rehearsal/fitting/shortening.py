"""Makes copies of a model with fewer layers, from which figures of the whole model follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.nn as nn

from mmfsdp.rehearsal.fakes.fake_copies import meta_model

__all__ = ["Stack", "short_models", "stacks_of"]

_FEWEST = 4  # two layers at either end: what a step gathers ahead reaches no further
_STEP = 2  # layers by which another short model is deeper, because every other layer may be different
_WORTHWHILE = 8  # layers from which on it is quicker to run two short models


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal layers that follow one another in a list of modules."""

    fqn: str
    """Name of the list."""
    first: int
    """Index of the first of the equal layers."""
    depth: int
    """How many they are."""

    @property
    def fewest(self) -> int:
        """Layers that the first short model keeps."""
        return _FEWEST + self.depth % _STEP


def stacks_of(model: nn.Module) -> tuple[Stack, ...]:
    """Return the stacks that are long enough to be shortened, those inside of another one left out."""
    found: list[Stack] = []

    def visit(fqn: str, module: nn.Module) -> None:
        run = _longest_run(module) if isinstance(module, nn.ModuleList | nn.Sequential) else range(0)
        if len(run) >= _WORTHWHILE:
            found.append(Stack(fqn, run.start, len(run)))
        for index, (name, child) in enumerate(module.named_children()):
            if len(run) < _WORTHWHILE or index not in run:
                visit(f"{fqn}.{name}" if fqn else name, child)

    visit("", model)
    return tuple(found)


def short_models(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[tuple[nn.Module, float, dict[str, int]]]:
    """Yield short copies of a model on the meta device, each with its weight and its layers by stack.

    If every layer adds the same amount to a figure, the whole model's figure is the sum of the copies' figures times
    their weights. The first copy keeps the fewest layers of every stack. For each depth, another copy keeps two layers
    more in the stacks of that depth.
    """
    depths = {stack.fqn: stack.fewest for stack in stacks}
    groups: dict[int, list[Stack]] = {}
    for stack in stacks:
        groups.setdefault(stack.depth, []).append(stack)
    weights = {depth: (depth - group[0].fewest) / _STEP for depth, group in groups.items()}
    yield _shortened(model, stacks, depths), 1 - sum(weights.values()), depths
    for depth, group in groups.items():
        deeper = {**depths, **{stack.fqn: stack.fewest + _STEP for stack in group}}
        yield _shortened(model, stacks, deeper), weights[depth], deeper


def _shortened(model: nn.Module, stacks: Sequence[Stack], depths: Mapping[str, int]) -> nn.Module:
    copied = meta_model(model)
    for stack in stacks:
        layers = copied.get_submodule(stack.fqn)
        del layers[stack.first + depths[stack.fqn] : stack.first + stack.depth]  # type: ignore[operator]
    return copied


def _longest_run(layers: nn.Module) -> range:
    """Return the indices of the longest run of children that have equal classes and shapes."""
    kinds = [_kind(child) for child in layers.children()]
    best, start = range(0), 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[start]:
            if index - start > len(best):
                best = range(start, index)
            start = index
    return best


def _kind(module: nn.Module) -> object:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    classes = tuple(type(part) for part in module.modules())
    return classes, tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
