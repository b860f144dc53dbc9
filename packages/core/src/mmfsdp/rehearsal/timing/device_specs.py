"""Devices that a step may run on: their peaks as vendors state them, and the share of these that kernels reach."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmfsdp.errors import ConfigError, closest
from mmfsdp.rehearsal.timing.links import Link, Links
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["UNKNOWN", "Device", "device_of", "devices", "write_device"]

UNKNOWN = (0, 0)
"""The compute capability of what is no NVIDIA GPU, or of one that nobody has stated."""

_TERA, _GIB, _MICRO = 1e12, 1 << 30, 1e-6

_PRODUCTS, _ATTENTION, _STREAMING = Range(0.45, 0.65, 0.8), Range(0.3, 0.4, 0.65), Range(0.65, 0.8, 0.92)
_SPREAD = Range(1.25, 1.0, 0.8)
_ISSUE = Range(12 * _MICRO, 6 * _MICRO, 4 * _MICRO)
_PCIE_4, _PCIE_5 = Range(18e9, 25e9, 28e9), Range(36e9, 50e9, 56e9)  # 16 lanes have 32e9 and 64e9 each way
_HOST = Range(6e9, 12e9, 60e9)

# Fitted to half of the published runs, and tested on the other half: python -m benchmarks.bench_published.
_A100_PRODUCTS, _H100_PRODUCTS = 0.72, 0.556  # the H100's clock falls under load, at 500 W as at 700 W
_FILLING = 220.0
_STREAMED = 0.7
_MARGIN = 0.11
_ISSUE_FITTED = Range(8 * _MICRO, 6 * _MICRO, 5 * _MICRO)

# Forward and backward of torch's flash attention. H100: 290 to 370 and 183 TFLOP/s, cuDNN about 600 in forward
# (https://github.com/pytorch/pytorch/issues/135431); A100: within the 0.5 to 0.73 of
# https://arxiv.org/abs/2307.08691 in forward, and below it in backward, an assumption.
_A100_FLASH, _H100_FLASH = (0.55, 0.45), (0.33, 0.185)
_CUDNN = 1.8


@dataclass(frozen=True)
class Device:
    """A device, and the time that the CPU beside it needs to issue its work."""

    name: str
    peaks: Mapping[str, float]
    """FLOP/s by dtype (dense), ``tfloat32`` included; dtypes that are missing compute as ``float32``."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: int
    """Bytes of its memory; 0 if it is not known."""
    links: Links
    """How it is connected to others, unless something else is said."""
    source: str
    """Where the peaks come from."""
    products: Range = _PRODUCTS
    """Share of the peak that large matrix products and convolutions reach."""
    attention: Range = _ATTENTION
    """Share of the peak that flash attention reaches in forward; what a causal mask hides does not count."""
    streaming: Range = _STREAMING
    """Share of the bandwidth that other operators reach."""
    copies: Range = _PCIE_4
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
    """Length of the shortest side of a product of matrices at which it reaches half of `products`."""

    def peak(self, dtype: str) -> float:
        """Return FLOP/s of a dtype."""
        return self.peaks.get(dtype) or self.peaks["float32"]


_NVLINK_LATENCY, _NET_LATENCY = 1.9 * _MICRO, 4 * _MICRO
"""Of one step of a ring; NCCL's own model of its protocol LL128 (``src/graph/tuning.cc``, ``hwLat``)."""


def _sxm(nvlink: float, net: float) -> Links:
    return Links(Link(nvlink, _NVLINK_LATENCY), Link(net, _NET_LATENCY), 8)


def _gpu(
    name: str,
    capability: tuple[int, int],
    peaks: tuple[float, float, float],
    bandwidth: float,
    gib: int,
    links: Links,
    source: str,
    copies: Range = _PCIE_5,
) -> Device:
    half, rounded, single = (peak * _TERA for peak in peaks)
    by_dtype = {"float16": half, "bfloat16": half, "tfloat32": rounded, "float32": single, "float64": single / 2}
    return Device(name, by_dtype, bandwidth * 1e9, gib * _GIB, links, source, capability=capability, copies=copies)


def _card(pcie: float, net: float) -> Links:
    """Return the links of a card without NVLink, whose messages pass through the memory of the host."""
    return Links(Link(pcie, 5.7 * _MICRO), Link(net, 10 * _MICRO), 8)


_RANGES = ("products", "attention", "attention_backward", "streaming", "copies", "host", "issue", "spread")


def _fitted(device: Device, products: float, attention: float, backward: float, cudnn: float = 1.0) -> Device:
    """Return a device with shares that were fitted to published runs, and the spread that 90 % of these have."""
    return replace(
        device,
        products=_around(products),
        filling=_FILLING,
        attention=_around(attention),
        attention_backward=_around(backward),
        cudnn=cudnn,
        streaming=_around(_STREAMED),
        issue=_ISSUE_FITTED,
        coverage="how far published runs on this architecture are from their forecasts",
    )


def _around(usual: float) -> Range:
    return Range(usual * (1 - _MARGIN), usual, usual / (1 - _MARGIN))


_HOPPER, _AMPERE, _ADA = (9, 0), (8, 0), (8, 9)
_A100 = _gpu("a100", _AMPERE, (312, 156, 19.5), 2039, 80, _sxm(300e9, 25e9), "NVIDIA A100 80GB SXM data sheet", _PCIE_4)
_A100 = _fitted(_A100, _A100_PRODUCTS, *_A100_FLASH)
_H100 = _gpu("h100", _HOPPER, (989, 494, 67), 3350, 80, _sxm(450e9, 50e9), "NVIDIA H100 SXM data sheet; DGX H100")
_H100 = _fitted(_H100, _H100_PRODUCTS, *_H100_FLASH, _CUDNN)
_CONSUMER = Range(0.6, 0.8, 0.95)

_PRESETS = {
    device.name: device
    for device in (
        # name, TFLOP/s dense of bf16, TF32 and FP32, GB/s, GiB, links per direction; NICs of 200 or 400 Gbit/s per GPU
        _A100,
        replace(_A100, name="a100-40gb", bandwidth=1555e9, memory=40 * _GIB, source="NVIDIA A100 40GB SXM data sheet"),
        _H100,
        replace(
            _H100,
            name="h100-96gb-500w",
            bandwidth=2400e9,
            memory=95 * _GIB,
            source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: HBM2e at 2.4 TB/s, limited to 500 W",
        ),
        _gpu(
            "h100-pcie",
            _HOPPER,
            (756, 378, 51),
            2000,
            80,
            _card(50e9, 25e9),
            "NVIDIA H100 PCIe data sheet, 350 W; without NVLink bridges",
        ),
        replace(
            _H100,
            name="h200",
            bandwidth=4800e9,
            memory=141 * _GIB,
            source="NVIDIA H200 SXM data sheet; DGX H200; shares are those of the H100",
        ),
        _gpu("b200", (10, 0), (2250, 1100, 80), 8000, 180, _sxm(900e9, 50e9), "NVIDIA HGX B200 data sheet; DGX B200"),
        _gpu("b300", (10, 3), (2250, 1100, 80), 8000, 270, _sxm(900e9, 100e9), "NVIDIA HGX B300 data sheet; DGX B300"),
        _gpu(
            "mi300x",
            UNKNOWN,
            (1307, 653, 163),
            5300,
            192,
            Links(Link(448e9, _NVLINK_LATENCY), Link(50e9, _NET_LATENCY), 8),
            "AMD Instinct MI300X data sheet; seven Infinity Fabric links of 64 GB/s each way",
        ),
        _gpu(
            "l40s",
            _ADA,
            (362, 183, 91.6),
            864,
            48,
            _card(20e9, 12.5e9),
            "NVIDIA L40S data sheet, without sparsity; PCIe 4.0 x16",
            _PCIE_4,
        ),
        replace(
            _gpu(
                "rtx4090",
                _ADA,
                (165.2, 82.6, 82.6),
                1008,
                24,
                _card(20e9, 3e9),
                "NVIDIA Ada whitepaper (tensor cores that add in FP32); PCIe 4.0 x16, 25 Gbit/s Ethernet",
                _PCIE_4,
            ),
            products=_CONSUMER,
        ),
        replace(
            _gpu(
                "rtx5090",
                (12, 0),
                (209.5, 104.8, 104.8),
                1792,
                32,
                _card(40e9, 3e9),
                "NVIDIA RTX Blackwell whitepaper (tensor cores that add in FP32); PCIe 5.0 x16, 25 Gbit/s Ethernet",
            ),
            products=_CONSUMER,
        ),
        Device(
            "cpu",
            {"float32": 1.0 * _TERA, "bfloat16": 1.0 * _TERA, "float64": 0.5 * _TERA},
            100e9,
            0,
            Links(Link(2e9, 50 * _MICRO), Link(1e9, 100 * _MICRO), 2),
            "no data sheet: a server CPU with AVX-512 and about 16 cores; calibrate for another one",
            products=Range(0.1, 0.5, 0.9),
            attention=Range(0.05, 0.2, 0.5),
            streaming=Range(0.1, 0.4, 0.8),
            issue=Range(20 * _MICRO, 8 * _MICRO, 4 * _MICRO),
            smallest=0.0,
            is_async=False,
        ),
    )
}


def devices() -> tuple[str, ...]:
    """Return the names of the devices that `mmfsdp.rehearsal.Rehearsal.time` knows."""
    return tuple(_PRESETS)


def device_of(device: str | Path | Device) -> Device:
    """Return a device by its name, or from a TOML file that a calibration wrote.

    Raises:
        ConfigError: There is no such device, or the file is not one of a calibration.
    """
    if isinstance(device, Device):
        return device
    text = str(device)
    if text.lower() in _PRESETS:
        return _PRESETS[text.lower()]
    if text.endswith(".toml"):
        return _read(Path(text))
    hint = closest(text, _PRESETS) or f" Known: {', '.join(_PRESETS)}."
    raise ConfigError(
        f"{text!r} is not a device that is known.{hint} Or give the TOML file of a calibration.", config="device"
    )


def write_device(device: Device, path: str | Path) -> None:
    """Write a device as TOML, for `device_of`. The file appears whole.

    Args:
        device: The device.
        path: A file whose name ends in ``.toml``; one that exists is replaced.

    Raises:
        ConfigError: The name ends otherwise.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise ConfigError(f"The file of a device ends in .toml, got {str(path)!r}.", config="path")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text("\n".join(_lines("", asdict(device))) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _lines(table: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table, those of the tables in it last."""
    for name, value in values.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{json.dumps(name)} = {json.dumps(value)}"
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = f"{table}.{json.dumps(name)}" if table else json.dumps(name)
            yield from ("", f"[{inner}]", *_lines(inner, value))


def _read(path: Path) -> Device:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        links = values.pop("links")
        within, between = Link(**links.pop("within")), Link(**links.pop("between"))
        reached = Range(*links.pop("reached"))
        values |= {name: Range(*values[name]) for name in _RANGES if name in values}
        values["capability"] = tuple(values.get("capability", UNKNOWN))
        return Device(**values, links=Links(within, between, reached=reached, **links))
    except OSError as error:
        raise ConfigError(f"The device in {str(path)!r} cannot be read: {error.strerror}.", config="device") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a device that a calibration wrote: {type(error).__name__}: {error}. Write one with "
            "mmfsdp.rehearsal.write_device().",
            config="device",
        ) from error
