"""`Fit`: the settings that a search has found, with the reason why faster ones do not fit, as a value that prints."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmfsdp.basics.text import human_bytes
from mmfsdp.rehearsal.fitting.rates import Rates
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import human_seconds

__all__ = ["Fit", "FitOption"]

_KINDS = 3  # kinds of memory that a reason names
_OWNERS = 3  # modules that it names
_LIKE = 3  # settings that are as good to print
_WIDTH = 110  # characters of its lines

_PLURALS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "reduce buffer": "buffers to reduce gradients",
    "activation": "activations",
    "recomputed": "recomputed activations",
    "activation gradient": "gradients of activations",
    "optimizer temporary": "temporaries of the optimizer",
    "buffer": "buffers",
    "input": "inputs",
    "ema": "averaged weights",
}


@dataclass(frozen=True)
class FitOption:
    """Settings, and what a step needs with them."""

    settings: Mapping[str, Any]
    """As `mmfsdp.plan` and `mmfsdp.ShardConfig.from_dict` take them."""
    accumulate: int
    """Micro-batches of a step."""
    samples: int
    """Samples of a micro-batch."""
    seconds: float
    """The time of a step."""
    nbytes: int
    """Bytes that the process takes of the device at most; see `Rehearsal.device_bytes`."""
    rehearsal: Rehearsal = field(repr=False)
    """The step of the whole model, with at most two micro-batches."""
    rates: Rates
    """Throughput of all ranks, the share of the device's peak, and costs."""
    reduces: bool = False
    """Whether gradients are reduced with every micro-batch: do not use `mmfsdp.no_sync`."""
    as_good: tuple[Mapping[str, Any], ...] = ()
    """Other settings that change time and memory by less than a hundredth: each has the sections that
    replace those in `settings`, None for sections to leave out, and ``accumulate`` and ``reduces`` if they differ."""

    @property
    def yaml(self) -> str:
        """The settings as YAML, one section a line."""
        lines = [f"{name}: {json.dumps(value)}" for name, value in self.settings.items()]
        return "\n".join(lines or ["{}"])

    def describe(self) -> dict[str, Any]:
        """Return plain values only, without the rehearsal."""
        names = ("accumulate", "reduces", "samples", "seconds", "nbytes")
        numbers = {**{name: getattr(self, name) for name in names}, **self.rates.describe()}
        as_good = [dict(changes) for changes in self.as_good]
        return {"settings": dict(self.settings), **numbers, "cpu_bytes": self.rehearsal.cpu_bytes, "as_good": as_good}

    def reason(self) -> str:
        """Return a sentence on when a step holds most memory, what for, and whose it is."""
        step, peak = self.rehearsal, self.rehearsal.peak
        kinds = sorted(peak.by_kind.items(), key=lambda item: -item[1])[:_KINDS]
        held = ", ".join(f"{human_bytes(size)} of {_PLURALS.get(kind, kind)}" for kind, size in kinds)
        owners = ", ".join(
            f"{human_bytes(size)} of {_PLURALS.get(kind, kind)} of {name or 'the model as a whole'}"
            for name, kind, size, _ in step.held()[:_OWNERS]
        )
        where = f"In {peak.phase}" + (f" of {peak.module}" if peak.module else "")
        more = " the most are" if len(peak.by_kind) > _KINDS else ""
        text = f"{where} it holds {human_bytes(peak.nbytes)}:{more} {held}. The largest parts are {owners}."
        if step.device_type != "cuda":
            return text
        kept, taken = step.reserved()[1] - peak.nbytes, step.device_bytes()[1] - step.reserved()[1]
        beside = f"up to {human_bytes(kept)} that the allocator keeps unused, and {human_bytes(taken)}"
        return f"{text} Beside it are {beside} of the CUDA context and NCCL."

    def __str__(self) -> str:
        divided = f"{self.accumulate} micro-batches of {self.samples}" if self.accumulate > 1 else "no accumulation"
        divided += ", gradients reduced with each" if self.reduces else ""
        offloaded = f" and {human_bytes(self.rehearsal.cpu_bytes)} of CPU memory" if self.rehearsal.on_cpu else ""
        return f"{human_seconds(self.seconds)} per step, {human_bytes(self.nbytes)}{offloaded}, {divided}"


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: the settings that fit, and why faster ones do not."""

    memory: int
    """Bytes of the device."""
    margin: float
    """Share of them that is left free."""
    ranks: int
    device: Device
    """The device, with the links between ranks."""
    options: tuple[FitOption, ...]
    """Settings that fit, the fastest first."""
    faster: FitOption | None
    """The next faster ones, which do not fit; None if the fastest of all fit."""
    smallest: FitOption | None
    """If nothing fits, the settings that need least memory."""
    considered: int
    """Combinations of settings that are possible for the model."""
    impossible: int
    """Combinations that are not."""
    rehearsed: int
    """Steps that were rehearsed, with the model or a copy that has fewer layers."""

    @property
    def room(self) -> int:
        """Bytes that a step may take of the device at most."""
        return round(self.memory * (1 - self.margin))

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        faster = None if self.faster is None else {**self.faster.describe(), "reason": self.faster.reason()}
        smallest = None if self.smallest is None else {**self.smallest.describe(), "reason": self.smallest.reason()}
        names = ("margin", "room", "ranks", "considered", "impossible", "rehearsed")
        return {
            "memory_bytes": self.memory,
            **{name: getattr(self, name) for name in names},
            "device": self.device.describe(),
            "options": [option.describe() for option in self.options],
            "faster": faster,
            "smallest": smallest,
        }

    def table(self) -> str:
        """Return the settings as YAML to copy, each with its time and memory, and why faster ones do not fit."""
        free = f" with {self.margin:.0%} left free" if self.margin else ""
        where = f"{human_bytes(self.memory)}{free} on each of {self.ranks} ranks ({self.device.name})"
        counts = f"of {self.considered} combinations of settings, {self.rehearsed} rehearsed"
        if self.smallest is not None:
            missing = human_bytes(self.smallest.nbytes - self.room)
            lines = [f"Nothing fits into {where}, {counts}. The smallest needs {missing} more:"]
            lines += ["", *_shown(self.smallest), "", *_wrapped(self.smallest)]
            return "\n".join(lines)
        lines = [f"The fastest that fit into {where}, {counts}:"]
        for option in self.options:
            lines += ["", *_shown(option)]
        if self.faster is not None:
            missing = human_bytes(self.faster.nbytes - self.room)
            lines += ["", f"The next faster one needs {missing} more than there is:", "", *_shown(self.faster)]
            lines += ["", *_wrapped(self.faster)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _wrapped(option: FitOption) -> list[str]:
    return textwrap.wrap(option.reason(), _WIDTH)


def _shown(option: FitOption) -> list[str]:
    lines = [f"# {option}", f"# {option.rates}", *option.yaml.splitlines()]
    if option.as_good:
        lines.append("# as good, within 1 %:")
        lines += [f"#   {_changed(changes)}" for changes in option.as_good[:_LIKE]]
    if more := len(option.as_good[_LIKE:]):
        lines.append(f"#   and {more} more")
    return lines


def _changed(changes: Mapping[str, Any]) -> str:
    written = (f"no {name}" if value is None else f"{name}: {json.dumps(value)}" for name, value in changes.items())
    return ", ".join(written)
