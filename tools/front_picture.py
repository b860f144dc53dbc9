"""Draws docs/images/llama_8b.svg: the plan of Llama 3 8B on 64 ranks beside the memory of a step, as reported.

``python tools/front_picture.py`` needs torch and transformers, takes about 15 s and downloads nothing.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.rehearsal import Rehearsal, report

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

WIDTH, HEIGHT, LINE = 1240, 430, 17
LEFT, TOP, ACROSS, DOWN = 690, 70, 530, 280  # of the chart
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; } .dim { fill: #59636e; font-size: 12px; }
.head { font-size: 15px; font-weight: 600; } .plan { font: 12px ui-monospace, monospace; white-space: pre; }
.areas path { stroke: #fff; stroke-width: .7; vector-effect: non-scaling-stroke; }
.level { stroke: #59636e; stroke-dasharray: 1 3; }
.phase { stroke: #d1d9e0; }
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
    page = report(step)
    found = re.search(r'<svg viewBox="0 0 1000 1000"[^>]*>(.*?)</svg>', page, re.DOTALL)
    patterns = re.search(r"<defs>.*?</defs>", page, re.DOTALL)
    top = re.search(r'"top": ?(\d+)', page)
    assert found is not None
    assert patterns is not None
    assert top is not None
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13">',
        f"<title>The plan of Llama 3 8B on {RANKS} ranks, and the memory of rank 0 over a step</title>",
        f"<style>{STYLE}</style>{patterns[0]}",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff" stroke="#d1d9e0"/>',
        *_plan(step),
        *_chart(step, found[1], int(top[1])),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _plan(step: Rehearsal) -> list[str]:
    lines = [
        *step.plan.tree().splitlines(),
        "",
        *str(step).splitlines()[:3],
        *str(step.time("h100")).splitlines()[:2],
    ]
    shown = [
        f'<text class="plan" x="20" y="{TOP + 8 + LINE * place}" xml:space="preserve">{escape(line)}</text>'
        for place, line in enumerate(lines)
    ]
    return [
        f'<text class="head" x="20" y="34">The plan of Llama 3 8B in {SETTINGS["precision"]}, and its forecast</text>',
        *shown,
    ]


def _chart(step: Rehearsal, areas: str, top: int) -> list[str]:
    parts = [
        f'<text class="head" x="{LEFT}" y="34">The memory of rank 0 over a step of {TOKENS:,} tokens</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{ACROSS}" height="{DOWN}" fill="#f6f8fa"/>',
        f'<svg class="areas" x="{LEFT}" y="{TOP}" width="{ACROSS}" height="{DOWN}" viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none">{areas}</svg>',
    ]
    for name, begin in step.phases:
        across = LEFT + ACROSS * begin / (step.last + 1)
        parts.append(f'<path class="phase" d="M{across:.1f} {TOP - 14}V{TOP + DOWN}"/>')
        if name in ("forward", "backward"):  # the others are too narrow for their names
            parts.append(f'<text class="dim" x="{across + 4:.1f}" y="{TOP - 4}">{name}</text>')
    gib = 2**30
    for size in range(16, top // gib + 1, 16):
        height = TOP + DOWN - DOWN * size * gib / top
        parts.append(f'<path class="level" d="M{LEFT} {height:.1f}h{ACROSS}"/>')
        parts.append(f'<text class="dim" x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{size} GiB</text>')
    moment = LEFT + ACROSS * step.peak.moment / (step.last + 1)
    height = TOP + DOWN - DOWN * step.peak.nbytes / top
    parts.append(f'<circle cx="{moment:.1f}" cy="{height:.1f}" r="4" fill="none" stroke="#1f2328" stroke-width="2"/>')
    parts.append(f'<text x="{moment + 9:.1f}" y="{height - 3:.1f}">peak {human_bytes(step.peak.nbytes)}</text>')
    return [*parts, *_legend(step)]


def _legend(step: Rehearsal) -> list[str]:
    parts: list[str] = []
    across, down = float(LEFT), TOP + DOWN + 24
    for kind, nbytes in sorted(step.peak.by_kind.items(), key=lambda item: -item[1]):
        if nbytes < step.peak.nbytes / 200:
            continue
        said = f"{kind} {human_bytes(nbytes)}"
        wide = 34 + 6.5 * len(said)
        if across + wide > WIDTH:
            across, down = LEFT, down + 22
        fill = kind.replace(" ", "-")
        parts.append(f'<rect x="{across:.0f}" y="{down - 11}" width="12" height="12" fill="url(#fill-{fill})"/>')
        parts.append(f'<text class="dim" x="{across + 17:.0f}" y="{down}">{said}</text>')
        across += wide
    return parts


if __name__ == "__main__":
    PICTURE.write_text(drawn(rehearsed()), encoding="utf-8")
