"""Names the rank that holds up all others, with its stack, and ends the job before the backend's timeout does."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmfsdp.collective.channels import host_of
from mmfsdp.collective.pulse import GONE, Pulse
from mmfsdp.collective.scopes import new_scope
from mmfsdp.collective.steps import check_same_arguments
from mmfsdp.errors import ConfigError
from mmfsdp.runtime.fsdp1.flat_params import watch_flat_units
from mmfsdp.runtime.ranks.stalled_ranks import Judge, Whereabouts
from mmfsdp.runtime.ranks.thread_stacks import stack_of, takes_long
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, name_of

__all__ = ["watch_ranks"]

_PATIENCE = 5.0  # seconds in which the error of a collective may end this process, once another one is gone
_EXIT_CODE = 75
_SILENT = " It answers to nothing: it is stopped, or its host is cut off."
_log = logging.getLogger("mmfsdp.runtime")


class watch_ranks:  # noqa: N801 - a context, as a function is
    """Watches all ranks of a model while they train, and names those that stop. Entering it is collective: every rank.

    If a rank holds up the others for ``stall_seconds``, every rank that still runs prints which one it is, its host,
    step, shard unit or collective and stack, and its own stacks, and ends with exit code 75, so that the launcher
    restarts the job. A rank that is only slow is named in the log of ``mmfsdp.runtime``. If a process ends without
    leaving the block, the others end at once, even if their collectives do not notice it.

    A rank holds up others if it is less far than they are, and neither compiles, saves nor loads. While all are equally
    far, as in an evaluation by one rank that the others wait for, nothing is a stall.

    Args:
        model: A sharded model.
        stall_seconds: Choose less than the timeout of the process group, and more than a healthy rank may wait for
            another one in a step.

    Raises:
        ConfigError: ``stall_seconds`` is not a positive number.
        LostRankError: The ranks cannot connect to the first one.
        RankMismatchError: Ranks gave different settings.
    """

    def __init__(self, model: nn.Module, stall_seconds: float) -> None:
        if isinstance(stall_seconds, bool) or not 0 < stall_seconds < float("inf"):
            raise ConfigError(f"stall_seconds={stall_seconds!r} is not a positive number of seconds.")
        self._model, self._limit = find_sharded_model(model), float(stall_seconds)

    def __enter__(self) -> Self:
        self._scope = new_scope(self._model.mesh)
        check_same_arguments(self._scope, "watch_ranks()", {"stall_seconds": self._limit})
        self._main = threading.get_ident()
        self._points = _Points()
        self._groups = self._model.groups
        subscribe(self._points, self._groups)
        self._leave_flat = watch_flat_units(self._model.module, self._points.gathering, self._points.reducing)
        self._hook = register_optimizer_step_post_hook(self._points.stepped)
        self._pulse = Pulse(self._scope)
        self._left = threading.Event()
        self._moved = 0, monotonic()
        self._is_blind = False
        thread = threading.Thread(target=self._watch, name="mmfsdp watch", daemon=True)
        thread.start()
        self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if kind is None or issubclass(kind, SystemExit):
            self._pulse.send("left")
        self._pulse.close()
        self._hook.remove()
        unsubscribe(self._points, self._groups)
        self._leave_flat()

    def _watch(self) -> None:
        try:
            self._watch_until_left()
        except Exception:
            # Its silence would look like a stall, so that the others would end a job that is well.
            _log.exception("This rank can no longer be watched, so that no rank is watched any more, after this error:")
            self._pulse.send("left")

    def _watch_until_left(self) -> None:
        pause = min(1.0, self._limit / 5)
        judge = Judge(self._scope.size, self._limit, monotonic())
        left, gone = set[int](), dict[int, float]()
        while not self._left.is_set():
            own = self._whereabouts()
            judge.hear(self._scope.rank, own, monotonic())
            self._pulse.send([own.as_json(), None])
            for rank, told in self._pulse.receive(pause):
                if told == "left":
                    left.add(rank)
                elif told == GONE:
                    gone.setdefault(rank, monotonic())
                else:
                    state, verdict = told
                    judge.hear(rank, Whereabouts(**state), monotonic())
                    if verdict:
                        self._tell(*verdict)
            for rank, since in gone.items():
                if rank not in left and monotonic() - since > _PATIENCE:
                    self._send_verdict("end", f"{judge.describe(rank)} It has ended, or failed.")
            if gone or left:
                continue
            if self._scope.is_first:
                self._judge(judge)
            elif judge.is_silent(0, monotonic(), self._limit):
                self._end(judge.describe(0) + _SILENT)

    def _judge(self, judge: Judge) -> None:
        now = monotonic()
        if stalled := judge.stalled(now):
            lines = []
            for rank in stalled:
                known = judge.whereabouts(rank)
                lines.append(judge.describe(rank) + (_SILENT if judge.is_silent(rank, now, self._limit / 2) else ""))
                lines += [known.stack] if known is not None and known.stack else []
            self._send_verdict("end", f"All ranks have waited {self._limit:g} s for:\n" + "\n".join(lines))
        elif (slow := judge.slow()) is not None:
            self._send_verdict("log", f"Most of the time all ranks wait for rank {slow}. {judge.describe(slow)}")

    def _send_verdict(self, kind: str, text: str) -> None:
        if self._scope.is_first:
            self._pulse.send([self._whereabouts().as_json(), [kind, text]])
        self._tell(kind, text)

    def _tell(self, kind: str, text: str) -> None:
        if kind == "log":
            _log.warning("%s", text)
        else:
            self._end(text)

    def _end(self, text: str) -> None:
        """Print the reason and this process's stacks, and end it. Its main thread may be waiting and never return."""
        me = f"rank {self._scope.rank} on host {host_of()!r}"
        said = f"mmfsdp: {me} ends with exit code {_EXIT_CODE}. {text}\nStacks of {me}:\n"
        with suppress(OSError):  # nobody reads standard error any more
            os.write(2, said.encode(errors="backslashreplace"))
        faulthandler.dump_traceback(2)
        os._exit(_EXIT_CODE)

    def _whereabouts(self) -> Whereabouts:
        progress, step, doing = self._points.progress, self._points.step, self._points.doing
        if moves := progress != self._moved[0]:
            self._moved = progress, monotonic()
        # A rank that moves is not held up, whatever it does.
        stack = traceback.StackSummary() if moves else stack_of(self._main)
        if stack is None and not self._is_blind:
            self._is_blind = True
            _log.warning(
                "This process cannot read where its main thread is, as with more than 100 threads. If this rank stops "
                "while the process lives, the others wait until the backend's timeout."
            )
        long = monotonic() - self._moved[1] > self._limit / 2
        lines = "".join(traceback.format_list(stack[-40:]))[-8000:] if stack and long else ""
        busy = stack is None or takes_long(stack)
        return Whereabouts(host_of(), progress, step, doing, busy, lines)


class _Points(Subscriber):
    """Counts the points that a rank passes, and knows its current activity."""

    turn = Turn.MEASURING

    def __init__(self) -> None:
        self.progress = self.step = 0
        self.doing = "before the first shard unit"

    def stepped(self, *_: Any) -> None:
        self.step += 1
        self._pass("between an optimizer step and the next shard unit")

    def before_gather(self, group: Group) -> None:
        self._pass(f"gathering the shard unit {name_of(group)!r}")

    def gathered(self, group: Group) -> None:
        self._pass(f"computing the shard unit {name_of(group)!r}")

    def before_reduce(self, group: Group) -> None:
        self.reducing(name_of(group))

    def reduced(self, group: Group) -> None:
        self._pass(f"computing before the shard unit {name_of(group)!r}")

    def gathering(self, unit: str, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Return what gathers a flat parameter, with the points before and after it."""
        name = unit or "(root)"

        def run(*args: Any, **kwargs: Any) -> Any:
            self._pass(f"gathering the shard unit {name!r}")
            result = gather(*args, **kwargs)
            self._pass(f"computing the shard unit {name!r}")
            return result

        return run

    def reducing(self, unit: str) -> None:
        self._pass(f"reducing the gradients of the shard unit {unit or '(root)'!r}")

    def _pass(self, doing: str) -> None:
        self.progress += 1
        self.doing = doing
