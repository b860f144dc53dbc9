"""Draws docs/images/llama_8b.svg: the memory of one of 64 GPUs over a step of Llama 3 8B, its peak stretched.

``python tools/front_picture.py`` needs torch and transformers, takes about 15 s and downloads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.rehearsal import Rehearsal

__all__ = ["PICTURE", "RANKS", "TOKENS", "drawn", "rehearsed"]

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "llama_8b.svg"
RANKS, TOKENS = 64, 8192
# What the config.json of Meta's Llama 3 8B says.
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    use_cache=False,
)
SETTINGS = {"precision": "bf16", "wrap": "LlamaDecoderLayer"}

# Units of the picture. A phone shows them at half their size, so that 26 become 13 pixels.
WIDTH, HEIGHT = 720, 590
LEFT, TOP, ACROSS, DOWN = 16, 112, 688, 290  # of the chart
POINTS = 500
PEAK_FROM, PEAK_WIDTH = 0.93, 0.16  # what is that close to the peak, head and loss, gets this share of the chart
GROUPS = {
    "weights, gradients, Adam": ("parameter", "buffer", "optimizer state", "ema", "input", "gradient"),
    "gathered weights": ("gathered", "reduce buffer"),
    "activations": ("activation", "recomputed"),
    "backward, optimizer": ("activation gradient", "optimizer temporary"),
}
STYLE = """
.card { fill: #fff; stroke: #d1d9e0; } .plot { fill: #f6f8fa; } .line { stroke: #59636e; stroke-dasharray: 3 5; }
text { font: 22px system-ui, sans-serif; fill: #1f2328; } .dim { fill: #59636e; }
.head { font-size: 30px; font-weight: 600; } .peak { font-size: 28px; font-weight: 700; }
.dot { fill: #1f2328; stroke: #fff; stroke-width: 3; }
.edge { stroke: #1f2328; stroke-width: 2; stroke-dasharray: 7 5; }
.g0 { fill: #0072b2; } .g1 { fill: #009e73; } .g2 { fill: #e69f00; } .g3 { fill: #cc79a7; }
@media (prefers-color-scheme: dark) {
  .card { fill: #0d1117; stroke: #3d444d; } .plot { fill: #151b23; } .line { stroke: #9198a1; }
  text { fill: #f0f6fc; } .dim { fill: #9198a1; } .dot { fill: #f0f6fc; stroke: #0d1117; } .edge { stroke: #f0f6fc; }
  .g0 { fill: #3a96d0; } .g1 { fill: #17b58a; } .g2 { fill: #e0a030; } .g3 { fill: #d692b8; }
}
"""


def rehearsed() -> Rehearsal:
    """Rehearse a step of one sequence per rank, on fake tensors."""
    with mmfsdp.parameters_on_meta():
        model = AutoModelForCausalLM.from_config(LLAMA_3_8B)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    return mmfsdp.rehearse(SETTINGS, model, batch, mesh=RANKS, optimizer="adamw", max_norm=1.0, device_type="cuda")


def drawn(step: Rehearsal) -> str:
    """Return the picture of a rehearsal."""
    time = str(step.time("h100")).splitlines()[0].partition(",")[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>The memory of one of {RANKS} GPUs over a step of Llama 3 8B</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        f'<text class="head" x="{LEFT}" y="44">Llama 3 8B, {SETTINGS["precision"]}, on {RANKS} GPUs</text>',
        f'<text class="dim" x="{LEFT}" y="78">Memory of one GPU over a step of {TOKENS:,} tokens</text>',
        *_chart(step),
        *_legend(step),
        f'<text class="dim" x="{LEFT}" y="{HEIGHT - 18}">Loss drawn wider. {time}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _chart(step: Rehearsal) -> list[str]:
    series = step.timeline(POINTS)
    sums = [sum(kinds.values()) for _, kinds in series]
    top, end = 1.2 * step.peak.nbytes, step.last + 1
    # A span lasts from the middle between its moment and the one before to the middle between it and the next.
    spots = [moment for moment, _ in series]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(spots)), float(end)]
    first = last = sums.index(max(sums))
    while first and sums[first - 1] > PEAK_FROM * sums[last]:
        first -= 1
    while last + 1 < len(sums) and sums[last + 1] > PEAK_FROM * max(sums):
        last += 1
    across = _stretch(edges[first], edges[last + 1], end)

    def down(nbytes: float) -> float:
        return TOP + DOWN - DOWN * nbytes / top

    parts = [f'<rect class="plot" x="{LEFT}" y="{TOP}" width="{ACROSS}" height="{DOWN}"/>']
    heights = [0] * len(series)
    areas = []
    for number, kinds in enumerate(GROUPS.values()):
        heights = [
            low + sum(held.get(kind, 0) for kind in kinds) for low, (_, held) in zip(heights, series, strict=True)
        ]
        areas.append(_area(number, [across(edge) for edge in edges], [down(height) for height in heights]))
    parts += reversed(areas)  # each covers the lower part of the one before it
    for gib in (32, 64):
        height = down(gib * 2**30)
        parts.append(f'<path class="line" d="M{LEFT} {height:.1f}h{ACROSS}"/>')
        parts.append(f'<text class="dim" x="{LEFT + 6}" y="{height - 6:.1f}">{gib} GiB</text>')
    ends = dict(zip((name for name, _ in step.phases), [*(begin for _, begin in step.phases[1:]), end], strict=True))
    high, low = edges[first], edges[last + 1]
    for name, begin, finish in (("forward", 0, high), ("loss", high, low), ("backward", low, ends["backward"])):
        middle = (across(begin) + across(finish)) / 2
        parts.append(f'<path class="line" d="M{across(finish):.1f} {TOP}V{TOP + DOWN + 8}"/>')
        parts.append(f'<text class="dim" x="{middle:.1f}" y="{TOP + DOWN + 26}" text-anchor="middle">{name}</text>')
    moment, height = across(step.peak.moment), down(step.peak.nbytes)
    parts.append(f'<path class="edge" d="M{moment:.1f} {height:.1f}V{TOP + DOWN}"/>')
    parts.append(f'<circle class="dot" cx="{moment:.1f}" cy="{height:.1f}" r="9"/>')
    said = f"peak {human_bytes(step.peak.nbytes)}"
    return [*parts, f'<text class="peak" x="{moment + 18:.1f}" y="{height - 8:.1f}">{said}</text>']


def _stretch(first: float, last: float, end: float) -> Callable[[float], float]:
    """Return the position across the picture of a moment; those from `first` to `last` are given more room."""
    wide = max(PEAK_WIDTH, (last - first) / end)
    rest = (1 - wide) / (end - (last - first))

    def across(moment: float) -> float:
        inside = min(max(moment - first, 0.0), last - first)
        return LEFT + ACROSS * ((moment - inside) * rest + inside / (last - first) * wide)

    return across


def _area(number: int, across: list[float], down: list[float]) -> str:
    path = [f"M{across[0]:.1f} {TOP + DOWN}"]
    for x, y, before in zip(across, down, [None, *down], strict=False):
        if y != before:
            path.append(f"H{x:.1f}V{y:.1f}")
    return f'<path class="g{number}" d="{"".join(path)}H{across[-1]:.1f}V{TOP + DOWN}Z"/>'


def _legend(step: Rehearsal) -> list[str]:
    parts = [f'<text class="dim" x="{LEFT}" y="{TOP + DOWN + 64}">At the peak, in GiB:</text>']
    for number, (group, kinds) in enumerate(GROUPS.items()):
        nbytes = sum(step.peak.by_kind.get(kind, 0) for kind in kinds)
        x, y = LEFT + number % 2 * 375, TOP + DOWN + 98 + number // 2 * 34
        parts.append(f'<rect class="g{number}" x="{x}" y="{y - 17}" width="20" height="20" rx="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{group} {nbytes / 2**30:.1f}</text>')
    return parts


if __name__ == "__main__":
    PICTURE.write_text(drawn(rehearsed()), encoding="utf-8")
