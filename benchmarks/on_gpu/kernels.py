"""Measures kernels of a GPU on their own: products, attention, convolutions, recurrent networks, and copies."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["MEASURES"]

_REPEATS, _WARM = 7, 2
_HALF = torch.bfloat16


def _micros(function: Callable[[], object], clean: torch.Tensor) -> float:
    """Return the median of a call, after the cache has been filled with something else."""
    found = []
    for place in range(_WARM + _REPEATS):
        clean.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if place >= _WARM:
            found.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(found), 2)


def _cleaner() -> torch.Tensor:
    return torch.empty(128 << 20, dtype=torch.int8, device="cuda")


def products() -> list[Any]:
    """Time products of matrices: dtype, m, k, n, microseconds."""
    clean, rows = _cleaner(), []
    sides = [
        (m, k, n)
        for m in (512, 2048, 8192, 32768)
        for k, n in itertools.product((256, 768, 2048, 4096, 8192), repeat=2)
    ]
    for name, dtype, tf32 in (("bf16", _HALF, False), ("tf32", torch.float32, True), ("fp32", torch.float32, False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for m, k, n in sides:
            if name != "bf16" and (k * n > 4096 * 4096 or m > 8192):
                continue
            a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
            rows.append([name, "forward", m, k, n, _micros(lambda a=a, b=b: F.linear(a, b), clean)])
            if name == "bf16" and k <= 4096:
                grad = torch.randn(m, n, device="cuda", dtype=dtype)
                rows.append([name, "of weight", m, k, n, _micros(lambda a=a, g=grad: g.t() @ a, clean)])
        torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def attention() -> list[Any]:
    """Time attention: backend, batch, heads, rows, columns, causal, microseconds of both directions, bytes kept."""
    clean, rows = _cleaner(), []
    shapes = [
        (2, 32, 4096, 64),
        (4, 16, 2048, 128),
        (2, 32, 4096, 128),
        (64, 16, 197, 64),
        (32, 16, 512, 64),
        (8, 16, 1024, 64),
        (1, 32, 8192, 128),
        (4, 8, 4096, 256),
        (16, 12, 1500, 64),
    ]
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for (batch, heads, length, columns), causal, (name, backend) in itertools.product(
        shapes, (True, False), backends.items()
    ):
        if name == "math" and length > 2048:
            continue
        q, k, v = (
            torch.randn(batch, heads, length, columns, device="cuda", dtype=_HALF, requires_grad=True) for _ in range(3)
        )
        try:
            with sdpa_kernel(backend):
                before = torch.cuda.memory_allocated()
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                kept = torch.cuda.memory_allocated() - before
                grad = torch.randn_like(out)
                forward = _micros(partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal), clean)
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                back = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
                back()
                peak = torch.cuda.max_memory_allocated() - held
                rows.append([name, batch, heads, length, columns, causal, forward, _micros(back, clean), kept, peak])
        except RuntimeError as error:
            rows.append([name, batch, heads, length, columns, causal, str(error)[:60]])
    return rows


def convolutions() -> list[Any]:
    """Time convolutions and measure their workspaces, forward, and backward: beyond what they return."""
    clean, rows = _cleaner(), []
    shapes = [  # batch, inputs, side, outputs, kernel, stride, groups
        (128, 3, 224, 64, 7, 2, 1),
        (128, 64, 56, 64, 3, 1, 1),
        (128, 128, 28, 128, 3, 1, 1),
        (128, 256, 14, 256, 3, 1, 1),
        (128, 512, 7, 512, 3, 1, 1),
        (128, 256, 56, 128, 1, 1, 1),
        (128, 1024, 14, 256, 1, 1, 1),
        (128, 256, 56, 512, 1, 2, 1),
        (128, 128, 56, 128, 3, 2, 1),
        (64, 192, 56, 192, 7, 1, 192),
        (64, 768, 14, 768, 7, 1, 768),
        (64, 3, 224, 192, 4, 4, 1),
        (64, 192, 56, 384, 2, 2, 1),
        (64, 3, 224, 1024, 16, 16, 1),
        (8, 64, 128, 64, 8, 8, 1),
        (8, 256, 128, 256, 3, 1, 256),
        (8, 768, 128, 768, 1, 1, 1),
        (32, 128, 112, 128, 3, 1, 128),
    ]
    for shape, dtype, last in itertools.product(shapes, (torch.float32, _HALF), (False, True)):
        batch, inputs, side, outputs, kernel, stride, groups = shape
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(batch, inputs, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
        x.requires_grad_(inputs != 3)
        w = torch.randn(outputs, inputs // groups, kernel, kernel, device="cuda", dtype=dtype).to(memory_format=layout)
        w.requires_grad_()
        pad = kernel // 2 if stride != kernel else 0

        run = partial(F.conv2d, x, w, stride=stride, padding=pad, groups=groups)
        try:
            run()
            forward = _peak_of(run)
            out = run()
            wanted = (x, w) if x.requires_grad else (w,)
            back = partial(torch.autograd.grad, out, wanted, torch.randn_like(out), retain_graph=True)
            back()
            backward = _peak_of(back)
            times = _micros(run, clean), _micros(back, clean)
            rows.append([str(dtype)[6:], "last" if last else "first", *shape, *forward, *backward, *times])
        except RuntimeError as error:
            rows.append([str(dtype)[6:], "last" if last else "first", *shape, str(error)[:80]])
    return rows


def batch_norms() -> list[Any]:
    """Measure batch norms: what forward and backward take and return, in bytes, and how long they take."""
    clean, rows = _cleaner(), []
    shapes = [  # batch, channels, side
        (128, 64, 112),
        (128, 64, 56),
        (128, 256, 56),
        (128, 128, 28),
        (128, 512, 28),
        (128, 256, 14),
        (128, 1024, 14),
        (128, 2048, 7),
        (256, 64, 112),
        (8, 768, 128),
        (2, 256, 200),
        (16, 32, 7),
    ]
    for shape, dtype, last, weights in itertools.product(
        shapes, (torch.float32, _HALF), (False, True), (torch.float32, _HALF)
    ):
        if dtype is torch.float32 and weights is _HALF:
            continue
        batch, channels, side = shape
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(batch, channels, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
        x.requires_grad_()
        norm = nn.BatchNorm2d(channels, device="cuda", dtype=weights)
        run = partial(norm, x)
        run()
        forward = _peak_of(run)
        out = run()
        back = partial(torch.autograd.grad, out, (x, norm.weight, norm.bias), torch.randn_like(out), retain_graph=True)
        back()
        backward = _peak_of(back)
        name = out.grad_fn.name() if out.grad_fn is not None else ""
        kinds = str(dtype)[6:], str(weights)[6:], "last" if last else "first"
        rows.append([*kinds, *shape, name, *forward, *backward, _micros(run, clean), _micros(back, clean)])
    return rows


def _peak_of(function: Callable[[], Any]) -> tuple[int, int]:
    """Return the most bytes that a call holds, and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak, kept


def recurrent() -> list[Any]:
    """Measure cuDNN's recurrent networks: what forward keeps and takes, and what backward takes, in bytes."""
    rows = []
    for kind, (time, batch, width, hidden, layers), both, dropout, dtype in itertools.product(
        ("LSTM", "GRU", "RNN"),
        (
            (64, 16, 256, 256, 1),
            (64, 16, 256, 512, 2),
            (128, 16, 512, 512, 3),
            (100, 8, 128, 384, 4),
            (512, 64, 1024, 1024, 2),
        ),
        (False, True),
        (0.0, 0.1),
        (torch.float32, _HALF),
    ):
        if dropout and layers == 1:
            continue
        cells = getattr(nn, kind)(width, hidden, layers, bidirectional=both, dropout=dropout).to("cuda", dtype)
        x = torch.randn(time, batch, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2):
            out, _ = cells(x)
            out.sum().backward()
            del out
            cells.zero_grad()
            x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, states = cells(x)
        kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        grad = torch.ones_like(out)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.backward(grad)
        back = torch.cuda.max_memory_allocated() - held
        returned = out.nbytes + sum(part.nbytes for part in (states if isinstance(states, tuple) else (states,)))
        rows.append(
            [
                kind,
                str(dtype)[6:],
                time,
                batch,
                width,
                hidden,
                layers,
                both,
                dropout,
                kept - returned,
                peak - kept,
                back,
            ]
        )
        del cells, x, out, states, grad
    return rows


def workspaces() -> dict[str, Any]:
    """Measure what stays allocated after the first product, one with a bias, one in backward, one on a stream."""
    found: dict[str, Any] = {}
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()

    def note(name: str) -> None:
        torch.cuda.synchronize()
        found[name] = torch.cuda.memory_allocated() - start

    a = torch.randn(256, 256, device="cuda", dtype=_HALF, requires_grad=True)
    bias = torch.randn(256, device="cuda", dtype=_HALF)
    note("tensors")
    with torch.no_grad():
        a @ a
        note("a product")
        F.linear(a, a, bias)
        note("a product with a bias")
        torch.bmm(a[None], a[None])
        note("a batched product")
        a.float() @ a.float()
        note("a product in float32")
    out = F.linear(a, a, bias)
    out.sum().backward()
    a.grad = None
    del out
    note("backward")
    with torch.cuda.stream(torch.cuda.Stream()):
        a.detach() @ a.detach()
    note("a product on another stream")
    return found


def streaming() -> list[Any]:
    """Time operators that move bytes: name, elements, bytes as counted, microseconds."""
    clean, rows = _cleaner(), []
    for count in (1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        for dtype in (torch.float32, _HALF):
            x, y = (torch.randn(count // 1024, 1024, device="cuda", dtype=dtype) for _ in range(2))
            w = torch.randn(1024, device="cuda", dtype=dtype)
            size = x.element_size()
            other = _HALF if dtype is torch.float32 else torch.float32
            for name, moved, function in (
                ("copy", 2, partial(y.copy_, x)),
                ("add", 3, partial(torch.add, x, y)),
                ("gelu", 2, partial(F.gelu, x)),
                ("cast", 2, partial(x.to, other)),
                ("layer_norm", 2, partial(F.layer_norm, x, (1024,), w, w)),
                ("rms_norm", 2, partial(F.rms_norm, x, (1024,), w)),
                ("softmax", 2, partial(x.softmax, -1)),
                ("sum", 1, x.sum),
                ("transpose", 2, x.t().contiguous),
            ):
                rows.append([name, str(dtype)[6:], count, count * size * moved, _micros(function, clean)])
    for params in (1 << 20, 1 << 24, 1 << 28):
        tensors = [torch.randn(params // 16, device="cuda", requires_grad=True) for _ in range(16)]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        for name, options in (("adamw foreach", {"foreach": True}), ("adamw fused", {"fused": True})):
            optimizer = torch.optim.AdamW(tensors, **options)
            rows.append([name, "float32", params, params * 28, _micros(optimizer.step, clean)])
        rows.append(
            [
                "clip",
                "float32",
                params,
                params * 12,
                _micros(lambda t=tensors: nn.utils.clip_grad_norm_(t, 1.0, foreach=True), clean),
            ]
        )
        del tensors, optimizer
        torch.cuda.empty_cache()
    host = torch.empty(256 << 20, dtype=torch.int8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    rows.append(
        [
            "to the device",
            "pinned",
            host.numel(),
            host.numel(),
            _micros(lambda: there.copy_(host, non_blocking=True), clean),
        ]
    )
    rows.append(
        [
            "to the host",
            "pinned",
            host.numel(),
            host.numel(),
            _micros(lambda: host.copy_(there, non_blocking=True), clean),
        ]
    )
    return rows


MEASURES: dict[str, Callable[[], Any]] = {
    "workspaces": workspaces,
    "recurrent": recurrent,
    "attention": attention,
    "convolutions": convolutions,
    "batch norms": batch_norms,
    "products": products,
    "streaming": streaming,
}
