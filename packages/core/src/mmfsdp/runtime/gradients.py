"""Completes gradients at the end of a backward: those that only some ranks have, and those of whole parameters.

A rank whose graph lacks a parameter contributes zeros to the sum, as with DistributedDataParallel. If no rank used the
parameter, its gradient stays None: with zeros, weight decay and momentum would change the parameter. The ranks agree on
the used parameters with one all-reduce of a byte per parameter, and only ranks that lack a gradient wait for it. The
same message detects ranks that gathered and reduced different units, which would go unnoticed if the units have equal
sizes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.errors import RankMismatchError
from mmfsdp.runtime.param_groups import (
    Group,
    around,
    has_gradient,
    name_of,
    shards_of,
    stand_in_for_missing,
    will_gather,
)

__all__ = ["GradientAgreement"]

_DIGEST = 8  # bytes
_Placed = list[tuple[int, torch.nn.Parameter]]


class GradientAgreement:
    """Completes the gradients of one sharded model in each backward that reduces them.

    Collective in backward: every rank of the mesh.

    Args:
        mesh: All ranks that train together.
        groups: The parameter groups of ``fully_shard``; none with engine ``fsdp1``, whose flat parameters always have
            gradients.
        whole: Parameters that every rank holds whole; their gradients are averaged here, in one bucket per dtype.
        is_reduced: Returns whether the current backward reduces the gradients of whole parameters.
    """

    def __init__(
        self, mesh: DeviceMesh, groups: list[Group], whole: list[torch.nn.Parameter], is_reduced: Callable[[], bool]
    ) -> None:
        self._rank_groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
        self._world_size = mesh.size()
        self._device = torch.device(mesh.device_type)
        self._whole = [weakref.ref(param) for param in whole]
        self._is_reduced = is_reduced
        self._missing: dict[int, dict[int, torch.nn.Parameter]] = {}
        self._trained_with: set[int] = set()
        self._sequence = 0
        self._backward = -1
        self._sent: _Sent | None = None
        self._count = len(whole)
        for group in groups:
            around(group, "unshard", functools.partial(self._noting, weakref.ref(group), self._count))
            around(group, "wait_for_unshard", functools.partial(self._waiting, weakref.ref(group)))
            around(group, "post_backward", functools.partial(self._completing, weakref.ref(group), self._count))
            self._count += len(list(shards_of(group)))

    def begin(self) -> None:
        """Arrange that the current backward completes its gradients at its end. Call it as often as you like."""
        backward = torch._C._current_graph_task_id()  # torch has no public name for the current backward
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)

    def check(self) -> None:
        """Check the message of the last backward if it has arrived. Not collective; the host never waits for a device.

        Raises:
            RankMismatchError: Ranks gathered and reduced different units.
        """
        sent = self._sent
        if sent is not None and sent.has_arrived():
            self._sent = None
            sent.check()

    def _noting(self, group: weakref.ref[Group], first: int, unshard: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_gather(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._trained_with.add(first)
            live = group()
            assert live is not None  # one of its methods is running
            if will_gather(live):
                self._note(first, 0)
            # What is gathered first under inference_mode() could never be gathered again outside of it.
            with torch.inference_mode(False), Waiting(f"gathering the shard unit {name_of(live)!r}"):
                return unshard(*args, **kwargs)

        return note_and_gather

    def _waiting(self, group: weakref.ref[Group], wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_for_gathered() -> Any:
            live = group()
            assert live is not None
            with torch.inference_mode(False), Waiting(f"gathering the shard unit {name_of(live)!r}"):
                return wait()

        return wait_for_gathered

    def _completing(
        self, group: weakref.ref[Group], first: int, post_backward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def complete_and_reduce(*args: Any) -> Any:
            live = group()
            assert live is not None
            # A unit that no rank used since the last reduction is not reduced.
            if live.reduce_grads and (first in self._trained_with or has_gradient(live)):
                self._trained_with.discard(first)
                self._remember(first, list(shards_of(live)), stand_in_for_missing(live))
                self._note(first, 1)
                self.begin()
            with Waiting(f"reducing the gradients of the shard unit {name_of(live)!r}"):
                return post_backward(*args)

        return complete_and_reduce

    def _remember(self, first: int, shards: list[torch.nn.Parameter], missing: list[int]) -> None:
        known = self._missing.get(first)
        if known is None:  # a gradient of an earlier backward is kept
            self._missing[first] = {place: shards[place] for place in missing if shards[place].grad is None}
        else:  # a unit that ran several times is reduced as often
            self._missing[first] = {place: known[place] for place in missing if place in known}

    def _note(self, *step: int) -> None:
        self._sequence = hash((self._sequence, *step))  # numbers have the same hash in every process

    def _finish(self) -> None:
        missing = [(first + place, shard) for first, found in self._missing.items() for place, shard in found.items()]
        self._missing = {}
        if not self._rank_groups:
            for _, shard in missing:
                shard.grad = None
            return
        whole = self._live_whole() if self._is_reduced() else []
        lacking = [place for place, param in whole if param.grad is None]
        self.check()
        self._sent = sent = self._send([*lacking, *(place for place, _ in missing)])
        self._average(whole)
        if not missing and not lacking:
            return
        self._sent = None
        used = sent.check()
        for place, shard in missing:
            if not used[place]:
                shard.grad = None
        for place, param in whole:
            if not used[place]:
                param.grad = None

    def _send(self, unused: list[int]) -> _Sent:
        digest = (self._sequence % 256**_DIGEST).to_bytes(_DIGEST, "little")
        self._sequence = 0
        content = bytearray(b"\1" * self._count + digest + bytes(255 - byte for byte in digest))
        for place in unused:
            content[place] = 0
        return _Sent(digest, torch.frombuffer(content, dtype=torch.uint8).to(self._device), self._rank_groups)

    def _average(self, whole: _Placed) -> None:
        buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for _, param in whole:
            buckets.setdefault((param.dtype, param.device), []).append(param)
        for params in buckets.values():
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            joined = torch.cat([grad.reshape(-1) for grad in grads])
            with Waiting("averaging the gradients of whole parameters"):
                for group in self._rank_groups:
                    dist.all_reduce(joined, group=group)
            joined.div_(self._world_size)
            for param, grad, mean in zip(params, grads, joined.split([grad.numel() for grad in grads]), strict=True):
                param.grad = grad.copy_(mean.view_as(grad))

    def _live_whole(self) -> _Placed:
        found = ((place, reference()) for place, reference in enumerate(self._whole))
        return [(place, param) for place, param in found if param is not None and param.requires_grad]


class _Sent:
    """A message that all ranks reduce by maximum: which parameters were used, and a digest with its complement."""

    def __init__(self, digest: bytes, content: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
        self._digest = digest
        self._content = content
        self._work: Any = None
        for group in groups:
            if self._work is not None:
                self._work.wait()
            self._work = dist.all_reduce(content, dist.ReduceOp.MAX, group=group, async_op=True)
        self._event: Any = None
        if content.device.type != "cpu":
            self._work.wait()  # on an accelerator the stream waits, not the host
            self._content = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            self._content.copy_(content, non_blocking=True)
            self._event = torch.get_device_module(content.device).Event()
            self._event.record()

    def has_arrived(self) -> bool:
        """Return whether `check` can run without making the host wait for an accelerator."""
        return self._event is None or bool(self._event.query())

    def check(self) -> bytes:
        """Wait for the other ranks, and return one byte per parameter: whether any rank used it."""
        with Waiting("agreeing on the parameters that a backward used"):
            self._work.wait() if self._event is None else self._event.synchronize()
        content = bytes(self._content.tolist())
        digest, inverse = content[-2 * _DIGEST : -_DIGEST], content[-_DIGEST:]
        if digest != self._digest or inverse != bytes(255 - byte for byte in digest):
            raise RankMismatchError(
                "Ranks gathered or reduced different shard units, or the same ones in another order, so this backward "
                "mixed up parameters or gradients. Every rank must run the same units: a part of the model that only "
                "some ranks use must not be a unit of its own (exclude it in the wrap policy), and calls that gather "
                "must be made on every rank."
            )
        return content
