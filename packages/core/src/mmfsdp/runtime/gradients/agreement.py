"""Completes gradients that only some ranks have, and averages whole parameters', at the end of their reduction.

A rank whose graph lacks a parameter contributes zeros to the sum, as with DistributedDataParallel. If no rank used the
parameter, its gradient stays None: with zeros, weight decay and momentum would change the parameter. The ranks agree on
the used parameters with one all-reduce of a byte per parameter, and only ranks that lack a gradient wait for it. The
same message detects ranks that gathered and reduced different units, which would go unnoticed if the units have equal
sizes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.errors import RankMismatchError
from mmfsdp.runtime.dtensors import data_mesh
from mmfsdp.runtime.gradients.backward import current_backward
from mmfsdp.runtime.torch_fsdp2.gathering import will_gather
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, reduces, shards_of
from mmfsdp.runtime.torch_fsdp2.unreduced import fill_missing, has_gradient

__all__ = ["GradientAgreement", "Message"]


_DIGEST = 8  # bytes
_MOST_UNREAD = 4
"""How many earlier backwards' messages may be in flight; a host that is further ahead of its device waits."""

_Placed = list[tuple[int, torch.nn.Parameter]]


class GradientAgreement(Subscriber):
    """Completes the gradients of one sharded model whenever they are reduced.

    Collective in backward, and where a pipeline reduces after it: every rank of the mesh.

    Args:
        mesh: All ranks that train together; gradients are averaged over those that get different batches.
        groups: The parameter groups of ``fully_shard``; none with engine ``fsdp1``, whose flat parameters always have
            gradients.
        whole: Parameters that every rank holds whole; their gradients are averaged here, in one bucket per dtype.
        is_reduced: Called at the end of a reduction; returns whether gradients of whole parameters are reduced.
        kept: Called when a group keeps its gradients instead of reducing them.
    """

    turn = Turn.AGREEING

    def __init__(
        self,
        mesh: DeviceMesh,
        groups: list[Group],
        whole: list[torch.nn.Parameter],
        is_reduced: Callable[[], bool],
        kept: Callable[[], None],
    ) -> None:
        self._rank_groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
        data = data_mesh(mesh)
        self._averaging = [group for group in data.get_all_groups() if dist.get_world_size(group) > 1]
        self._data_size = data.size()
        self._device = torch.device(mesh.device_type)
        self._whole = [weakref.ref(param) for param in whole]
        self._is_reduced, self._kept = is_reduced, kept
        self._missing: dict[int, dict[int, torch.nn.Parameter]] = {}
        self._trained_with: set[int] = set()
        self._sequence = 0
        self._backward: int | None = None
        self._unfinished: set[int] = set()  # groups of a reduction outside of a backward that torch has not finished
        self._unread: deque[tuple[Message, bytes]] = deque()
        self._count = len(whole)
        self._first: dict[int, int] = {}  # by id of a group: the index of its first parameter in the message
        for group in groups:
            self._first[id(group)] = self._count
            self._count += len(list(shards_of(group)))
        subscribe(self, groups)

    def begin(self) -> None:
        """Arrange that gradients are completed where their reduction ends. Call it as often as you like.

        That is the end of the current backward. A pipeline keeps the gradients of several backwards, and reduces them
        outside of all: then it is where torch finishes the last group.
        """
        if (backward := current_backward()) is None:
            self._unfinished = self._unfinished or {*self._first}
        elif backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)

    def check(self) -> None:
        """Check the messages of earlier backwards that have arrived. Not collective; does not wait for a device.

        Raises:
            RankMismatchError: Ranks gathered and reduced different units.
        """
        while self._unread and self._unread[0][0].has_arrived():
            self._read()

    def settle(self) -> None:
        """Wait for the messages of all backwards and check them. Not collective: they are under way already.

        Raises:
            RankMismatchError: Ranks gathered and reduced different units.
        """
        while self._unread:
            self._read()

    def before_gather(self, group: Group) -> None:
        """Note that the unit is gathered, and whether to train with it."""
        first = self._first[id(group)]
        if torch.is_grad_enabled():
            self._trained_with.add(first)
        if will_gather(group):
            self._note(first, 0)

    def before_reduce(self, group: Group) -> None:
        """Give zeros to parameters that this rank did not use."""
        first = self._first[id(group)]
        if not reduces(group):
            self._kept()
        # A unit that no rank used since the last reduction is not reduced.
        elif first in self._trained_with or has_gradient(group):
            self._trained_with.discard(first)
            missing = fill_missing(group)
            if missing or first in self._missing:
                self._remember(first, list(shards_of(group)), missing)
            self._note(first, 1)
            self.begin()

    def finished(self, group: Group) -> None:
        """Complete the gradients of a reduction outside of a backward with its last group."""
        if self._unfinished:
            self._unfinished.discard(id(group))
            if not self._unfinished:
                self._finish()

    def _remember(self, first: int, shards: list[torch.nn.Parameter], missing: list[int]) -> None:
        known = self._missing.get(first)
        if known is None:  # a gradient of an earlier backward is kept
            self._missing[first] = {index: shards[index] for index in missing if shards[index].grad is None}
        else:  # a unit that ran several times is reduced as often
            self._missing[first] = {index: known[index] for index in missing if index in known}

    def _note(self, *step: int) -> None:
        self._sequence = hash((self._sequence, *step))  # numbers have the same hash in every process

    def _finish(self) -> None:
        missing = [(first + index, shard) for first, found in self._missing.items() for index, shard in found.items()]
        self._missing = {}
        is_reduced = self._is_reduced()
        if not self._rank_groups:
            for _, shard in missing:
                shard.grad = None
            return
        whole = self._live_whole() if is_reduced else []
        lacking = [index for index, param in whole if param.grad is None]
        self.check()
        while len(self._unread) >= _MOST_UNREAD:
            self._read()
        self._send([*lacking, *(index for index, _ in missing)])
        self._average(whole)
        if not missing and not lacking:
            return
        used = b""
        while self._unread:  # this backward's message is the last
            used = self._read()
        for index, shard in missing:
            if not used[index]:
                shard.grad = None
        for index, param in whole:
            if not used[index]:
                param.grad = None

    def _send(self, unused: list[int]) -> None:
        digest = (self._sequence % 256**_DIGEST).to_bytes(_DIGEST, "little")
        self._sequence = 0
        content = bytearray(b"\1" * self._count + digest + bytes(255 - byte for byte in digest))
        for index in unused:
            content[index] = 0
        self._unread.append((Message(content, self._device, self._rank_groups), digest))

    def _read(self) -> bytes:
        """Wait for the oldest message, check it, and return for each parameter whether any rank used it."""
        message, sent = self._unread.popleft()
        with Waiting("agreeing on the parameters that a backward used"):
            content = message.read()
        digest, inverse = content[-2 * _DIGEST : -_DIGEST], content[-_DIGEST:]
        if digest != sent or inverse != bytes(255 - byte for byte in digest):
            self._unread.clear()
            raise RankMismatchError(
                "Ranks gathered or reduced different shard units, or the same ones in another order, so this backward "
                "mixed up parameters or gradients. Every rank must run the same units: a part of the model that only "
                "some ranks use must not be a unit of its own (exclude it in the wrap policy), and calls that gather "
                "must be made on every rank."
            )
        return content

    def _average(self, whole: _Placed) -> None:
        buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for _, param in whole:
            buckets.setdefault((param.dtype, param.device), []).append(param)
        for params in buckets.values():
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            joined = torch.cat([part.reshape(-1) for part in local])
            with Waiting("averaging the gradients of whole parameters"):
                for group in self._averaging:
                    dist.all_reduce(joined, group=group)
            joined.div_(self._data_size)
            means = joined.split([part.numel() for part in local])
            for param, grad, part, mean in zip(params, grads, local, means, strict=True):
                part.copy_(mean.view_as(part))
                param.grad = grad

    def _live_whole(self) -> _Placed:
        found = ((index, reference()) for index, reference in enumerate(self._whole))
        return [(index, param) for index, param in found if param is not None and param.requires_grad]


class Message:
    """A message of bytes: each rank receives the maximum of every byte. Collective: every rank of the groups.

    On an accelerator neither making the message nor asking for it makes the host wait for the device: it goes there and
    back through pinned memory, in the order of the current stream.

    Args:
        content: What this rank says, one byte per fact. It belongs to the message from now on.
        device: Where the groups reduce.
        groups: The groups to reduce over, one after the other; at least one.
    """

    def __init__(self, content: bytearray, device: torch.device, groups: list[dist.ProcessGroup]) -> None:
        self._content = content  # on the CPU the groups reduce it directly
        self._event: Any = None
        sent = torch.frombuffer(content, dtype=torch.uint8)
        if device.type != "cpu":
            sent = sent.pin_memory().to(device, non_blocking=True)
        self._work: Any = None
        for group in groups:
            if self._work is not None:
                self._work.wait()  # on an accelerator the stream waits, not the host
            self._work = dist.all_reduce(sent, dist.ReduceOp.MAX, group=group, async_op=True)
        if device.type != "cpu":
            self._work.wait()
            self._received = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
            self._received.copy_(sent, non_blocking=True)
            self._event = torch.get_device_module(device).Event()
            self._event.record()

    def has_arrived(self) -> bool:
        """Return whether `read` can run without making the host wait for an accelerator."""
        return self._event is None or bool(self._event.query())

    def read(self) -> bytes:
        """Wait for the other ranks, and return the maximum of each byte."""
        if self._event is None:
            self._work.wait()
            return bytes(self._content)
        self._event.synchronize()
        return bytes(self._received.tolist())
