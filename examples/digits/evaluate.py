"""Loads converted weights into plain PyTorch, with neither mmfsdp nor MMEngine, and prints the accuracy."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from vit import VisionTransformer

__all__ = ["accuracy"]


def accuracy(path: str) -> float:
    """Return the share of right predictions on the validation digits, in percent."""
    weights = load_file(path)
    model = VisionTransformer()
    model.load_state_dict({name.removeprefix("vit."): tensor for name, tensor in weights.items()})
    model.eval()
    data = load_digits()
    images = torch.tensor(data.images[::5], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target[::5])
    with torch.no_grad():
        return 100.0 * (model(images).argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    print(f"{accuracy(sys.argv[1]):.2f}")
    loaded = [name for name in sys.modules if name.split(".")[0] in ("mmfsdp", "mmengine")]
    assert not loaded, loaded
