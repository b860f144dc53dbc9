"""Extends an out-of-memory error by what the step was doing, what it held, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch
import torch.nn as nn

from mmfsdp.basics.text import clean_fqn, human_bytes
from mmfsdp.rehearsal.allocator.accounting import changes
from mmfsdp.rehearsal.allocator.kept import kept_bytes
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.savings import savings_text
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.torch_fsdp2.observing import Role, Subscriber, Turn, subscribe, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, unit_of
from mmfsdp.runtime.training import clip_grad_norm_

__all__ = ["explain_out_of_memory"]

_ROWS = 6  # modules to name
_UNUSED = 0.1  # of what the allocator reserved: from here on its fragments are worth a sentence
_DIFFERENT = 0.02  # by which what is kept between steps must differ from the forecast to be named
_SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@contextmanager
def explain_out_of_memory(
    rehearsal: Rehearsal | Callable[[], Rehearsal | None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[None]:
    """Explain a ``torch.OutOfMemoryError`` of the training inside: the error goes on with a note. Not collective.

    The note says in which phase, module or unit the step was, what the forecast expects there and at its peak, which
    modules hold most of it, what the rank keeps in fact where it is not as forecast, and the changes of
    `Rehearsal.savings` with the bytes that each saves. Nothing is recorded before an error: where it is follows from
    the error's traceback, and in backward from the unit whose backward began last.

    Args:
        rehearsal: The step as it was rehearsed; one from `advise` also says what to change. Or a function that returns
            it, or None, once there is an error, for loops that rehearse with their first batch.
        model: The sharded model that trains.
        optimizer: Its optimizer, to compare its state; None to leave that out.
    """
    state = find_sharded_model(model)
    follower = _Follower()
    subscribe(follower, state.groups)
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase, module = _position_of(error.__traceback__, state.module)
        module = module or follower.unit_in(phase)
        known = rehearsal if isinstance(rehearsal, Rehearsal) else rehearsal()
        if known is not None:
            error.add_note(_explained(known, phase, module, follower.doing, kept_bytes(state.module, optimizer)))
        raise
    finally:
        unsubscribe(follower, state.groups)


class _Follower(Subscriber):
    """Notes the unit that runs backward or communicates, and stays where it was when an error passes."""

    turn = Turn.MEASURING

    def __init__(self) -> None:
        self.doing = ""
        self._sends, self._runs = "", ""

    def unit_in(self, phase: str) -> str:
        """Return the unit that communicates, or else the one whose backward began last; empty if there is none."""
        if self.doing:
            return self._sends
        return self._runs if phase == "backward" else ""

    def before_backward(self, group: Group) -> None:
        self._runs = unit_of(group)

    @contextmanager
    def _follow(self, group: Group, role: Role) -> Iterator[None]:
        self._sends, self.doing = unit_of(group), "while gathering, " if role == "gather" else "while reducing, "
        yield
        self.doing = ""

    def communicating(self, group: Group, role: Role) -> AbstractContextManager[None]:
        return self._follow(group, role)


def _position_of(trace: TracebackType | None, model: nn.Module) -> tuple[str, str]:
    """Return the phase and the innermost module of a traceback."""
    names = {id(module): clean_fqn(name) for name, module in model.named_modules()}
    phase, module = "forward", ""
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            phase = "optimizer"
        elif frame.f_code is clip_grad_norm_.__code__:
            phase = "clipping"
        elif frame.f_code is torch.autograd.backward.__code__:
            phase = "backward"
        elif id(owner) in names:
            module = names[id(owner)]
        trace = trace.tb_next
    return phase, module


def _explained(rehearsal: Rehearsal, phase: str, module: str, doing: str, kept: dict[str, int]) -> str:
    peak = rehearsal.peak
    where = f"in {phase}" + (f" of {module}" if module else "")
    moment = _highest_in(rehearsal, phase, module)
    there = rehearsal.at(peak.moment if moment is None else moment)
    lines = [f"Rank {rehearsal.rank} of {rehearsal.mesh} ran out of memory {doing}{where}."]
    if moment is None:
        lines.append(f"The forecast has no such place; its peak is {human_bytes(peak.nbytes)}, in {peak.phase}.")
    else:
        at = f"in {peak.phase}" + (f" of {peak.module}" if peak.module else "")
        lines.append(
            f"The forecast holds {human_bytes(there.nbytes)} there, and {human_bytes(peak.nbytes)} at its peak, {at}."
        )
    lines += _measured(rehearsal)
    lines += [
        f"{kind}: {human_bytes(size)} here, {human_bytes(rehearsal.static.get(kind, 0))} in the forecast."
        for kind, size in kept.items()
        if abs(size - rehearsal.static.get(kind, 0)) > _DIFFERENT * max(size, 1)
    ]
    lines.append("Held there, as forecast:")
    lines += [
        f"    {human_bytes(size)} of {kind} of {name or 'the model as a whole'}"
        for name, kind, size, _ in rehearsal.held(there.moment)[:_ROWS]
    ]
    advice = savings_text(rehearsal.savings)
    return "\n".join(lines + (advice or ["To see what to change, rehearse with mmfsdp.rehearsal.advise()."]))


def _measured(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what torch's allocator holds on a GPU, and what its fragments would give."""
    if rehearsal.device_type != "cuda" or not torch.cuda.is_available():
        return
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    yield f"Allocated are {human_bytes(allocated)}, and {human_bytes(reserved)} are taken from the device."
    if reserved - allocated > _UNUSED * reserved:
        saved = rehearsal.reserved()[1] - rehearsal.reserved(expandable=True)[1]
        yield f"{_SETTING} joins free fragments; in the forecast that saves up to {human_bytes(max(saved, 0))}."


def _highest_in(rehearsal: Rehearsal, phase: str, module: str) -> int | None:
    """Return the moment at which most is held of those in which a phase allocates for a module or a part of it."""
    own = {
        item.begin
        for item in rehearsal.allocations
        if not module or item.module == module or item.module.startswith(f"{module}.")
    }
    best, most, held, index, current = None, -1, 0, 0, "before"
    for moment, change, _ in changes(rehearsal.allocations):
        while index < len(rehearsal.phases) and rehearsal.phases[index][1] <= moment:
            current, index = rehearsal.phases[index][0], index + 1
        held += change
        if held > most and current == phase and (change > 0 and moment in own):
            best, most = moment, held
    return best
