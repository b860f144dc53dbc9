"""Draws the pictures of pages in docs/images: ``python -m tests.pages.draw``. Needs Chromium, numpy and Pillow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageChops
from safetensors.torch import save_file
from tests.pages.browser import DARK, run
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import diff, diff_page
from mmfsdp.parity import comparison_page
from mmfsdp.rehearsal import report

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT, MARGIN = 800, 2400, 12
LEFT_OUT = """
.wide, details:not(:has(.row)), figcaption, footer { display: none }
section:is([aria-labelledby=modules], [aria-labelledby=time], [aria-labelledby=scaling], [aria-labelledby=sent],
  [aria-labelledby=notes]) { display: none }
main { padding-top: 0.8rem } h2 { margin-top: 1rem } .treemap { height: 20rem }
h2:has(+ .plot) ~ h2, .plot ~ .plot, .plot ~ .note { display: none }
"""


def step_of_the_docs() -> str:
    """Return the page of the example of docs/explanation/rehearsal.md, with more layers."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        batch = torch.empty(4, 512, 1024)
    config = {"precision": "bf16", "wrap": {"kind": "module_class", "classes": "TransformerEncoderLayer"}}
    return report(mmfsdp.rehearse(config, model, batch, mesh=64, optimizer="adamw", max_norm=1.0, device="h100"))


def two_checkpoints() -> str:
    """Return the page of two checkpoints: one layer was trained, and one was rounded."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    first = {f"model.{name}": value for name, value in nn.TransformerEncoder(layer, 4).state_dict().items()}
    second = {name: value.clone() for name, value in first.items()}
    for name, value in second.items():
        if ".layers.1." in name:
            value *= 1 + 10 ** (torch.randn_like(value) - 4)
        elif ".layers.3.linear1" in name:
            value.copy_(value.bfloat16())
    save_file(first, "epoch_1.safetensors")
    save_file({**second, "head.weight": torch.ones(3, 3)}, "epoch_2.safetensors")
    return diff_page(diff("epoch_1.safetensors", "epoch_2.safetensors", histogram=True))


def two_runs() -> str:
    """Return the page of two runs: the second one steps further."""
    for name, lr in (("one_process", 1e-3), ("two_ranks", 1.01e-3)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        with mmfsdp.recording(f"records/{name}", model, optimizer):
            for _ in range(2):
                model(torch.randn(2, 8, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    page = comparison_page(mmfsdp.compare("records/one_process", "records/two_ranks"))
    return page.replace("<h2>Step 0", '<h2 hidden="">Step 0', 1)


def draw(page: str, target: Path, flags: Sequence[str] = ()) -> None:
    """Write a picture of a page, without its tables and lists."""
    path, shot = Path("page.html"), Path("shot.png")
    path.write_text(page.replace("</style>", f"{LEFT_OUT}</style>"), encoding="utf-8")
    run(path.absolute(), *flags, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot.absolute()}")
    image = Image.open(shot).convert("RGB")
    image = image.crop((0, 0, image.width, image.height - 100))  # the end of the window may be black
    empty = Image.new("RGB", image.size, image.getpixel((0, 0)))
    _, _, _, bottom = ImageChops.difference(image, empty).getbbox() or (0, 0, 0, image.height)
    shown = image.crop((0, 0, image.width, bottom + MARGIN)).quantize(128, dither=Image.Dither.NONE)
    shown.save(target, optimize=True)


def main() -> None:
    """Write all pictures."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # pages show the paths that they are given
        step = step_of_the_docs()
        draw(step, IMAGES / "report_light.png")
        draw(step, IMAGES / "report_dark.png", DARK)
        draw(two_checkpoints(), IMAGES / "diff_page.png")
        draw(two_runs(), IMAGES / "compare_page.png")
        os.chdir(here)


if __name__ == "__main__":
    main()
