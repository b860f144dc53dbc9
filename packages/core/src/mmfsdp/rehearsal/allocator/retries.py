"""How often torch gives cached memory back to a GPU that is full, in each step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mmfsdp.basics.text import human_bytes, human_range
from mmfsdp.rehearsal.allocator.caching import DeviceFullError
from mmfsdp.rehearsal.allocator.replaying import replayed
from mmfsdp.rehearsal.allocator.wrapping import Wrapped
from mmfsdp.rehearsal.recording.step_records import Allocation

__all__ = ["Retries", "retries_of", "retries_text", "verdict_text"]

_STEPS = 4  # the first ones leave other segments behind than they found


@dataclass(frozen=True)
class Retries:
    """The caching allocator's retries in each step on a GPU that has no more memory: at least and at most.

    It asks the GPU for memory and gets none, waits until the GPU has finished, gives all free segments back, and asks
    again; it does not look whether something that is free now is large enough
    (https://github.com/pytorch/pytorch/issues/189504). Steps become slower, by a time that depends on the machine: one
    of a 7B model on A100 took 7.3 s in place of 5.3 s (https://github.com/pytorch/pytorch/issues/104509). No forecast
    of time contains it. The range covers what of the GPU is taken beside the allocator.
    """

    number: tuple[int, int] = (0, 0)
    """How often; ``num_alloc_retries`` in ``torch.cuda.memory_stats()`` grows by as much with every step."""
    returned: tuple[int, int] = (0, 0)
    """Bytes that are given back, and taken again."""
    fits: tuple[bool, bool] = (True, True)
    """Whether memory suffices: for certain, and at all."""

    def __bool__(self) -> bool:
        """Whether the GPU may be too small for what the allocator would keep."""
        return bool(self.number[1]) or not all(self.fits)

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return {name: dict(zip(("low", "high"), values, strict=True)) for name, values in vars(self).items()}


def retries_of(
    allocations: Sequence[Allocation],
    late: Sequence[Allocation],
    phases: Iterable[tuple[str, int]],
    memory: int,
    beside: tuple[int, int],
    workspaces: Iterable[int],
    wrapped: Sequence[Wrapped] = (),
) -> Retries:
    """Return what happens in a step of a run that has just begun: its first step makes the optimizer's state.

    A run that loads the state before needs less memory, and often no retries.

    Args:
        allocations: All allocations of a step.
        late: The same with the ends that they have if the GPU is behind the CPU; see
            `mmfsdp.rehearsal.allocator.waiting`.
        phases: Names of the step's phases, each with its first moment.
        memory: Bytes of the GPU.
        beside: The least and the most bytes that are taken beside the allocator.
        workspaces: Bytes of blocks that kernels keep.
        wrapped: See `mmfsdp.rehearsal.allocator.wrapping`.
    """
    state_from = next((begin for name, begin in phases if name == "optimizer"), None)
    kept, found, fits = list(workspaces), [], []
    ends = [None] if late is allocations else [None, late]
    for other, after in product((beside[1], sum(beside) / 2, beside[0]), ends):
        try:
            step = replayed(
                allocations,
                workspaces=kept,
                state_from=state_from,
                limit=memory - other,
                steps=_STEPS,
                late=after,
                wrapped=wrapped,
            )
        except DeviceFullError:
            fits.append(False)
        else:
            fits.append(True)
            found.append((step.retries, step.returned))
    numbers, sizes = zip(*found, strict=True) if found else ((0,), (0,))
    return Retries((min(numbers), max(numbers)), (min(sizes), max(sizes)), (all(fits), any(fits)))


def verdict_text(taken: tuple[int, int], memory: int, retries: Retries) -> str:
    """Return whether a step fits, in a line that a reader finds first.

    Args:
        taken: The least and the most bytes that the process takes of the GPU.
        memory: Bytes of the GPU.
        retries: What happens on it.
    """
    low, high, size = (f"{count / 2**30:.2f}" for count in (*taken, memory))
    span = high if low == high else f"{low} to {high}"
    if taken[1] <= memory:
        found = "fits"
    elif not retries.fits[0]:
        found = "may not fit" if retries.fits[1] else "does not fit"
    else:
        found = "fits, but torch empties its cache in each step" if retries.number[1] else "may just fit"
    return f"{span} of {size} GiB: {found}"


def retries_text(retries: Retries, memory: int, expandable: tuple[int, int]) -> str:
    """Return a sentence that says what happens on a GPU that is too small.

    Args:
        retries: What happens.
        memory: Bytes of the GPU.
        expandable: The least and the most bytes that the process takes of the GPU with expandable segments.
    """
    size, most = human_bytes(memory), retries.number[1]
    if not retries.fits[1]:
        found = f"The GPU has {size}: memory runs out."
    else:
        found = f"The GPU has {size}" + ("" if retries.fits[0] else ", which may not suffice")
        times = f"up to {most}" if most > retries.number[0] else f"{most}"
        again = f"torch gives cached memory back {times} {'time' if most == 1 else 'times'} in each step, and waits"
        found += f": {again} ({human_bytes(retries.returned[1])})." if most else "."
    return f"{found} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True takes {human_range(expandable)}."
