"""The devices that are known by name, with the sources of their figures."""

from __future__ import annotations

from dataclasses import replace

from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device
from mmfsdp.rehearsal.timing.links import Link, Links
from mmfsdp.rehearsal.timing.ranges import Range

__all__ = ["PRESETS"]

_TERA, _GIB, _MICRO = 1e12, 1 << 30, 1e-6
_PCIE_4, _PCIE_5 = Range(18e9, 25e9, 28e9), Range(36e9, 50e9, 56e9)  # 16 lanes have 32e9 and 64e9 each way

# Fitted to half of the published runs, and tested on the other half: python -m benchmarks.bench_published.
_A100_PRODUCTS, _H100_PRODUCTS = 0.72, 0.556  # the H100's clock falls under load, at 500 W as at 700 W
_FILLING = 220.0
_SHORT = 500.0  # measured with sequences of 50 to 1,024 rows on an H100
_STREAMED = 0.7
_MARGIN = 0.11
_H100_ALONE = 1.7  # measured, python -m benchmarks.bench_on_gpu: products of 25 steps on one H100 reached 0.85 to 0.94
_ISSUE_FITTED = Range(50 * _MICRO, 20 * _MICRO, 6 * _MICRO)

# Forward and backward of torch's flash attention. H100: 290 to 370 and 183 TFLOP/s, cuDNN about 600 in forward
# (https://github.com/pytorch/pytorch/issues/135431); A100: within the 0.5 to 0.73 of
# https://arxiv.org/abs/2307.08691 in forward, and below it in backward, an assumption.
_A100_FLASH, _H100_FLASH = (0.55, 0.45), (0.33, 0.185)
_CUDNN = 1.8
_ADA_PRODUCTS, _ADA_STREAMED = 1.05, 0.9  # an RTX 4090's clock is above the one that its peak is stated for
_ADA_REACHED = Range(0.7, 0.8, 0.9)  # of PCIe 4.0 with all lanes

_NVLINK_LATENCY, _NET_LATENCY = 1.9 * _MICRO, 4 * _MICRO
"""Of one step of a ring; NCCL's own model of its protocol LL128 (``src/graph/tuning.cc``, ``hwLat``)."""


def _sxm(nvlink: float, net: float) -> Links:
    return Links(Link(nvlink, _NVLINK_LATENCY), Link(net, _NET_LATENCY), 8)


def _gpu(
    name: str,
    capability: tuple[int, int],
    peaks: tuple[float, float, float],
    bandwidth: float,
    gib: float,
    links: Links,
    source: str,
    copies: Range = _PCIE_5,
) -> Device:
    half, rounded, single = (peak * _TERA for peak in peaks)
    by_dtype = {"float16": half, "bfloat16": half, "tfloat32": rounded, "float32": single, "float64": single / 2}
    return Device(name, by_dtype, bandwidth * 1e9, int(gib * _GIB), links, source, capability=capability, copies=copies)


def _card(pcie: float, net: float) -> Links:
    """Return the links of a card without NVLink, whose messages pass through the memory of the host."""
    return Links(Link(pcie, 5.7 * _MICRO), Link(net, 10 * _MICRO), 8)


def _fitted(device: Device, products: float, attention: float, backward: float, cudnn: float = 1.0) -> Device:
    """Return a device with shares that were fitted to published runs, and the spread that 90 % of these have."""
    return replace(
        device,
        products=_around(products),
        filling=_FILLING,
        attention=_around(attention),
        attention_backward=_around(backward),
        cudnn=cudnn,
        short=_SHORT,
        streaming=_around(_STREAMED),
        issue=_ISSUE_FITTED,
        coverage="how far published runs on this architecture are from their forecasts",
    )


def _around(usual: float) -> Range:
    return Range(usual * (1 - _MARGIN), usual, usual / (1 - _MARGIN))


_HOPPER, _AMPERE, _ADA = (9, 0), (8, 0), (8, 9)
_A100 = _gpu(
    "a100", _AMPERE, (312, 156, 19.5), 2039, 79.14, _sxm(300e9, 25e9), "NVIDIA A100 80GB SXM data sheet", _PCIE_4
)
_A100 = _fitted(_A100, _A100_PRODUCTS, *_A100_FLASH)
_H100 = _gpu("h100", _HOPPER, (989, 494, 67), 3350, 79.1, _sxm(450e9, 50e9), "NVIDIA H100 SXM data sheet; DGX H100")
_H100 = replace(_fitted(_H100, _H100_PRODUCTS, *_H100_FLASH, _CUDNN), alone=_H100_ALONE)
_CONSUMER = Range(0.6, 0.8, 0.95)

PRESETS = {
    device.name: device
    for device in (
        # name, TFLOP/s dense of bf16, TF32 and FP32, GB/s, GiB as torch reports them (the least of several reports, as
        # drivers keep 1 to 2 %, and error correction of an L40S 6), links per direction; NICs of 200 or 400 Gbit/s
        _A100,
        replace(
            _A100,
            name="a100-40gb",
            bandwidth=1555e9,
            memory=int(39.38 * _GIB),
            source="NVIDIA A100 40GB SXM data sheet",
        ),
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
            79.1,
            _card(50e9, 25e9),
            "NVIDIA H100 PCIe data sheet, 350 W; without NVLink bridges",
        ),
        replace(
            _H100,
            name="h200",
            bandwidth=4800e9,
            memory=int(139.8 * _GIB),
            source="NVIDIA H200 SXM data sheet; DGX H200; shares are those of the H100",
        ),
        _gpu(
            "b200", (10, 0), (2250, 1100, 80), 8000, 178.35, _sxm(900e9, 50e9), "NVIDIA HGX B200 data sheet; DGX B200"
        ),
        _gpu(
            "b300", (10, 3), (2250, 1100, 80), 8000, 267.69, _sxm(900e9, 100e9), "NVIDIA HGX B300 data sheet; DGX B300"
        ),
        _gpu(
            "mi300x",
            UNKNOWN,
            (1307, 653, 163),
            5300,
            191.69,
            Links(Link(448e9, _NVLINK_LATENCY), Link(50e9, _NET_LATENCY), 8),
            "AMD Instinct MI300X data sheet; seven Infinity Fabric links of 64 GB/s each way",
        ),
        _gpu(
            "l40s",
            _ADA,
            (362, 183, 91.6),
            864,
            44.34,
            _card(20e9, 12.5e9),
            "NVIDIA L40S data sheet, without sparsity; PCIe 4.0 x16",
            _PCIE_4,
        ),
        replace(
            _gpu(
                "rtx3090",
                (8, 6),
                (71.2, 35.6, 35.6),
                936,
                23.69,
                _card(20e9, 3e9),
                "NVIDIA GA102 whitepaper (tensor cores that add in FP32); PCIe 4.0 x16, 25 Gbit/s Ethernet",
                _PCIE_4,
            ),
            products=_CONSUMER,
        ),
        replace(
            _fitted(
                _gpu(
                    "rtx4090",
                    _ADA,
                    (165.2, 82.6, 82.6),
                    1008,
                    23.52,
                    replace(_card(25e9, 3e9), reached=_ADA_REACHED),
                    "NVIDIA Ada whitepaper (tensor cores that add in FP32); PCIe 4.0 x16, 25 Gbit/s Ethernet",
                    _PCIE_4,
                ),
                _ADA_PRODUCTS,
                *_A100_FLASH,
            ),
            streaming=_around(_ADA_STREAMED),
        ),
        replace(
            _gpu(
                "rtx5090",
                (12, 0),
                (209.5, 104.8, 104.8),
                1792,
                31.36,
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
