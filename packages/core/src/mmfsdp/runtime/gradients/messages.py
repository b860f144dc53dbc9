"""Bytes that all ranks reduce by maximum, while the host goes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Message"]


class Message:
    """A message of which each rank gets the largest bytes of all. Collective: every rank of the groups.

    On an accelerator neither making the message nor asking for it makes the host wait for the device: it goes there and
    back through pinned memory, in the order of the current stream.

    Args:
        content: What this rank says, one byte per fact. It belongs to the message from now on.
        device: Where the groups reduce.
        groups: The groups to reduce over, one after the other; at least one.
    """

    def __init__(self, content: bytearray, device: torch.device, groups: list[dist.ProcessGroup]) -> None:
        self._content = content  # on the CPU, what the groups reduce
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
        """Wait for the other ranks, and return the largest bytes of all."""
        if self._event is None:
            self._work.wait()
            return bytes(self._content)
        self._event.synchronize()
        return bytes(self._received.tolist())
