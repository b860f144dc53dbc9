"""The GPU memory of NCCL: what the process takes once, and the buffers of each communicator. Pure.

Sources: NCCL's code (``src/init.cc``, ``src/transport``), whose sizes are the same from 2.12 to 2.30; since 2.22 a
connection is made when a collective first needs it, and since 2.25 there are up to 64 channels; and what NCCL 2.28 took
on an H100 and an H200. Figures of others are in the range: 544 and 688 MiB for groups of two and of four A100
(https://github.com/NVIDIA/nccl/issues/964), and 512 MiB for a single rank on a B300
(https://github.com/NVIDIA/nccl/issues/2363).
"""

from __future__ import annotations

import os

from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device

__all__ = ["NCCL_LIBRARY", "alone_bytes", "communicator_bytes"]

_MIB = 1 << 20
_HOPPER, _BLACKWELL, _CONSUMER = 9, 10, 12  # major numbers of compute capabilities

NCCL_LIBRARY = (170 * _MIB, 356 * _MIB)
"""Least and most bytes that a process takes for its first communicator beside the communicator's buffers: NCCL 2.28 on
an H200, with one rank, which computes nothing, and with two."""

_CHANNELS = 32  # at most
_BLACKWELL_CHANNELS = 64
_FEWEST, _OVER_SOCKETS, _NO_CHANNEL = 2, 6 * _MIB, 4 * _MIB  # channels; bytes of each, and beside all of them
_PROTOCOLS, _BUFFER = 8 * _MIB, 4 * _MIB
"""Of a connection: the buffers of LL and LL128, 5.2 MiB, with what rounding up to 2 MiB adds to all; and its buffer."""
_SWITCHED = 8 * _MIB  # of a channel, for NVLink SHARP: 1 MiB in each direction and for each of 8 GPUs, in half of them


def communicator_bytes(device: Device | None = None) -> tuple[int, int]:
    """Return the least and the most bytes of a communicator of several ranks.

    The least are two channels of 6 MiB, as NCCL 2.28 took for two ranks that were connected through sockets, whose
    buffers lie in CPU memory; with 16 channels it took 101 MiB. The most are all channels, each with the connections of
    a ring and of a tree, and from Hopper on the buffers of NVLink SHARP. ``NCCL_MIN_NCHANNELS``,
    ``NCCL_MAX_NCHANNELS``, ``NCCL_BUFFSIZE`` and ``NCCL_NVLS_ENABLE=0`` change these, as in training.

    Args:
        device: The device; one that is not known counts as Hopper.
    """
    most = max(_number("NCCL_MAX_NCHANNELS", _channels(device)), 1)
    fewest = min(max(_number("NCCL_MIN_NCHANNELS", _FEWEST), 1), most)
    is_switched = _HOPPER <= _major(device) < _CONSUMER and _number("NCCL_NVLS_ENABLE", 1)
    each = 2 * (_PROTOCOLS + _number("NCCL_BUFFSIZE", _BUFFER)) + (_SWITCHED if is_switched else 0)
    return _NO_CHANNEL + fewest * _OVER_SOCKETS, most * each


def alone_bytes(device: Device | None = None) -> tuple[int, int]:
    """Return the same of a communicator of a single rank: none if the loop makes none, or all channels.

    NCCL 2.28 took 388 MiB on an H100, 12 for each of 32 channels.
    """
    return 0, _NO_CHANNEL + _channels(device) * (_PROTOCOLS + _BUFFER)


def _channels(device: Device | None) -> int:
    return _BLACKWELL_CHANNELS if _major(device) >= _BLACKWELL else _CHANNELS


def _major(device: Device | None) -> int:
    return _HOPPER if device is None or device.capability == UNKNOWN else device.capability[0]


def _number(name: str, usual: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdecimal() else usual
