"""Writes bases, LoRA adapters, and what peft's own merge_and_unload() makes of them in float64.

    python tests/core/arithmetic/adapters/make.py     # peft 0.21.2, transformers 5.23.0, torch 2.13.0

Each folder beside this file has ``base.safetensors``, peft's two files, ``merged.safetensors``, and
``trained.safetensors``: what a training program saves of the model, with the base and the adapter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(12, 12), nn.Linear(12, 5, bias=False)
        self.norm = nn.LayerNorm(12)


class Model(nn.Module):
    """Linear layers of two shapes, an embedding, convolutions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList([Block(), Block()])
        self.conv, self.point = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Gpt(nn.Module):
    """GPT-2's layers, whose weights are transposed, one of them square."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(36, 12), Conv1D(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


CASES: dict[str, tuple[type[nn.Module], LoraConfig]] = {
    "plain": (
        Model,
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["embed", "q_proj", "v_proj", "conv", "point"],
            modules_to_save=["head"],
            rank_pattern={"layers.1.q_proj": 7, "conv": 2},
            alpha_pattern={r"layers\.\d.v_proj": 3},
            bias="lora_only",
            init_lora_weights=False,
        ),
    ),
    "rslora": (
        Model,
        LoraConfig(r=5, lora_alpha=8, target_modules=["q_proj", "head"], use_rslora=True, init_lora_weights=False),
    ),
    "conv1d": (
        Gpt,
        LoraConfig(
            r=3, lora_alpha=5, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False
        ),
    ),
    "dora": (Gpt, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
}


def make(name: str) -> None:
    torch.manual_seed(0)
    kind, config = CASES[name]
    base = kind()
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file(base.state_dict(), folder / "base.safetensors")
    tuned = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    tuned.save_pretrained(folder)
    (folder / "README.md").unlink()
    save_file(tuned.state_dict(), folder / "trained.safetensors")
    fresh = kind()
    torch.manual_seed(0)
    fresh = kind()
    merged = PeftModel.from_pretrained(fresh, folder).double().merge_and_unload()
    if name == "dora":
        (folder / "base.safetensors").unlink()
    else:
        save_file(
            {key: value.contiguous() for key, value in merged.state_dict().items()}, folder / "merged.safetensors"
        )


if __name__ == "__main__":
    for name in CASES:
        make(name)
