"""Draws the pictures of a report in docs/images: ``python -m tests.pages.draw``. Needs Chromium and Pillow."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageChops
from tests.pages.browser import DARK, run
from torch import nn

import mmfsdp
from mmfsdp.rehearsal import Rehearsal, report

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT, SCALE = 1160, 2000, 0.65
LEFT_OUT = """
.wide, details, figcaption, footer { display: none }
section:has(#modules), section:has(#scaling), section:has(#sent), section:has(#notes) { display: none }
.treemap { height: 22rem !important } h2 { margin-top: 1rem !important }
"""


def step_of_the_docs() -> Rehearsal:
    """Rehearse the example of docs/explanation/rehearsal.md."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        batch = torch.empty(4, 512, 1024)
    config = {"precision": "bf16", "wrap": {"kind": "module_class", "classes": "TransformerEncoderLayer"}}
    return mmfsdp.rehearse(config, model, batch, mesh=64, optimizer="adamw", max_norm=1.0)


def main() -> None:
    """Write a picture for each theme, without the tables and lists of the page."""
    page = report(step_of_the_docs()).replace("</style>", f"{LEFT_OUT}</style>")
    with tempfile.TemporaryDirectory() as folder:
        path, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        path.write_text(page, encoding="utf-8")
        for theme, flags in (("light", ()), ("dark", DARK)):
            size = (f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}")
            run(path, *flags, *size, f"--screenshot={shot}")
            image = Image.open(shot).convert("RGB")
            image = image.crop((0, 0, image.width, image.height - 100))  # the end of the window may be black
            empty = Image.new("RGB", image.size, image.getpixel((0, 0)))
            _, _, _, bottom = ImageChops.difference(image, empty).getbbox() or (0, 0, 0, image.height)
            shown = image.crop((0, 0, image.width, bottom + 12)).quantize(48, dither=Image.Dither.NONE)
            shown.save(IMAGES / f"report_{theme}.png", optimize=True)


if __name__ == "__main__":
    main()
