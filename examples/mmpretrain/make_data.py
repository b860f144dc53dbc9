"""Writes 16 images for training and 4 for validation into data/imagenet, in ImageNet's layout with lists of labels."""

from pathlib import Path

import numpy as np
from PIL import Image

DATA = Path("data/imagenet")

for split, count in (("train", 16), ("val", 4)):
    for folder in (DATA / split, DATA / "meta"):
        folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (count, 256, 256, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(DATA / split / f"{number}.png")
    (DATA / "meta" / f"{split}.txt").write_text("".join(f"{number}.png {number}\n" for number in range(count)))
