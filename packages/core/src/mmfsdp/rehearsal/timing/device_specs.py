"""`Device`: the peaks of a device as its vendor states them, and the share of these that kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmfsdp.rehearsal.timing.links import Links
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["UNKNOWN", "Device"]

UNKNOWN = (0, 0)
"""The compute capability of a device that is not an NVIDIA GPU, or whose capability is not stated."""

_MICRO = 1e-6
_PRODUCTS, _ATTENTION, _STREAMING = Range(0.45, 0.65, 0.8), Range(0.3, 0.4, 0.65), Range(0.65, 0.8, 0.92)
_SPREAD = Range(1.25, 1.0, 0.8)
_ISSUE = Range(12 * _MICRO, 6 * _MICRO, 4 * _MICRO)
_COPIES = Range(18e9, 25e9, 28e9)
_HOST = Range(6e9, 12e9, 110e9)


@dataclass(frozen=True)
class Device:
    """A device, and the time that the CPU beside it needs to issue its work."""

    name: str
    peaks: Mapping[str, float]
    """FLOP/s by dtype (dense), ``tfloat32`` included; dtypes that are missing compute as ``float32``."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: int
    """Bytes of its memory as ``torch.cuda.get_device_properties()`` reports them, which is 1 to 8 % less than its data
    sheet states; 0 if it is not known."""
    links: Links
    """How it is connected to others, unless the user names another network."""
    source: str
    """Where the peaks come from."""
    products: Range = _PRODUCTS
    """Share of the peak that large matrix products and convolutions reach."""
    attention: Range = _ATTENTION
    """Share of the peak that flash attention reaches in forward; what a causal mask hides does not count."""
    streaming: Range = _STREAMING
    """Share of the bandwidth that other operators reach."""
    copies: Range = _COPIES
    """Bytes per second between its memory and the CPU's, one way; usually PCIe 4.0 x16."""
    host: Range = _HOST
    """Bytes per second that the CPU reads and writes in the optimizer of one rank: one thread, as torchrun sets it by
    default, or several."""
    issue: Range = _ISSUE
    """Seconds that the CPU needs to issue an operator; of a view, a third."""
    smallest: float = 2 * _MICRO
    """Seconds of the smallest kernel."""
    is_async: bool = True
    """Whether the CPU runs ahead of it, and communication beside it."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds of operators that were measured, by `Operator.signature`; they replace the roofline."""
    issues: Mapping[str, float] = field(default_factory=dict)
    """Seconds to issue an operator that were measured, by phase, and by role if it gathers or reduces a unit; they
    replace `issue`."""
    spread: Range = _SPREAD
    """The factor for measured times."""
    coverage: str = "the shares of the peaks that kernels usually reach; no device has measured it"
    """The sources of uncertainty that the interval of a step's time covers."""
    capability: tuple[int, int] = UNKNOWN
    """The compute capability of an NVIDIA GPU: ``(9, 0)`` for Hopper."""
    attention_backward: Range | None = None
    """Share of the peak that flash attention reaches in backward; None: as in forward."""
    cudnn: float = 1.0
    """How many times as fast cuDNN's attention is."""
    filling: float = 0.0
    """Length of the shortest side of a product of matrices in bfloat16 at which it reaches half of `products`; in other
    dtypes it is shorter or longer as their peaks are lower or higher."""
    short: float = 0.0
    """Rows at which attention reaches half of its highest speed; its shares are for 2,048 rows or more."""
    alone: float = 1.0
    """How many times as fast products are in a step on one rank: nothing is sent beside them, and no other device takes
    its share of power."""

    @property
    def type(self) -> str:
        """Type of the device in torch: ``'cpu'``, or ``'cuda'``, which AMD's GPUs have, too."""
        return "cuda" if self.is_async else "cpu"

    def describe(self) -> dict[str, Any]:
        """Return plain values only: what a forecast depends on most."""
        return {
            "name": self.name,
            "type": self.type,
            "memory_bytes": self.memory,
            "bandwidth": self.bandwidth,
            "capability": None if self.capability == UNKNOWN else list(self.capability),
            "links": asdict(self.links),
            "source": self.source,
        }

    def by_itself(self) -> Device:
        """Return the device in a step on one rank, see `alone`."""
        if self.alone == 1.0:
            return self
        return replace(self, products=Range(*(min(share * self.alone, 1.0) for share in self.products)))

    def peak(self, dtype: str) -> float:
        """Return FLOP/s of a dtype."""
        return self.peaks.get(dtype) or self.peaks["float32"]
