"""Throughput of a step, the share of the device that it uses, and its costs. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Rates", "rates_of"]

_HOUR = 3600
_BILLION, _MILLION = 10**9, 10**6


@dataclass(frozen=True)
class Rates:
    """A job's throughput and costs."""

    samples_per_second: float
    """Samples of all ranks."""
    tokens_per_second: float | None
    """Tokens of one rank; None if the batch has none."""
    utilization: float
    """Share of the device's peak that the model's FLOPs are; see `StepTime.model_utilization`."""
    price_per_billion_tokens: float | None = None
    """In the currency of the price per hour; None without one, or if the batch has no tokens."""
    price_per_million_samples: float | None = None
    price_per_hour: float | None = None
    """Of all ranks."""

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return asdict(self)

    def __str__(self) -> str:
        trained = f"{self.samples_per_second:,.4g} samples per second in all"
        if self.tokens_per_second is not None:
            trained = f"{self.tokens_per_second:,.0f} tokens per second and rank"
        parts = [trained, f"{self.utilization:.1%} of the peak (MFU)"]
        if self.price_per_hour is not None:
            parts.append(f"{self.price_per_hour:,.2f} per hour")
        if self.price_per_billion_tokens is not None:
            parts.append(f"{self.price_per_billion_tokens:,.2f} per billion tokens")
        elif self.price_per_million_samples is not None:
            parts.append(f"{self.price_per_million_samples:,.2f} per million samples")
        return ", ".join(parts)


def rates_of(seconds: float, useful: float, samples: int, tokens: int | None, ranks: int, price: float | None) -> Rates:
    """Return what a job trains per second.

    Args:
        seconds: The time of a step.
        useful: Seconds that the model's FLOPs take at the device's peak.
        samples: Samples of one rank in a step.
        tokens: Tokens of one rank in a step; None if it has none.
        ranks: Number of ranks.
        price: Price of one device for an hour; None if it is not known.
    """
    costs: Mapping[str, float] = {}
    if price is not None:
        each = price * seconds / _HOUR  # of a step of one rank
        costs = {"price_per_million_samples": each / samples * _MILLION, "price_per_hour": price * ranks}
        if tokens:
            costs = {**costs, "price_per_billion_tokens": each / tokens * _BILLION}
    return Rates(samples * ranks / seconds, tokens / seconds if tokens else None, useful / seconds, **costs)
