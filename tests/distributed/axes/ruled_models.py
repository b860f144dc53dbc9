"""Models that rules of the config divide, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from tests.distributed.axes.divided_models import VOCABULARY, make_llama, make_neox, make_small
from torch import nn

__all__ = ["RULES", "make_ruled", "ruled_loss"]

_VIT = {
    "**.attention.[qkv]_proj": "colwise",
    "**.attention.o_proj": "rowwise",
    "**.fc1": "colwise",
    "**.fc2": "rowwise",
}
_SEQUENCE = {
    "0": {"style": "rowwise", "output": "sequence"},
    "*.norm": "sequence",
    "*.up": {"style": "colwise", "input": "sequence"},
    "*.down": {"style": "rowwise", "output": "sequence"},
    "3": "sequence",
    "4": {"style": "colwise", "input": "sequence", "output": "replicate"},
}
_NEOX = {
    "gpt_neox.embed_in": "rowwise",
    "**.query_key_value": "colwise",
    "**.attention.dense": "rowwise",
    "**.dense_h_to_4h": "colwise",
    "**.dense_4h_to_h": "rowwise",
    "lm_head": {"style": "colwise", "output": "replicate"},
}
RULES: dict[str, Any] = {"llama": "auto", "tied": "auto", "qwen3": "auto", "vit": _VIT, "neox": _NEOX, "odd": _SEQUENCE}
"""The setting ``parallel`` of each model."""


class Block(nn.Module):
    """A norm and two linear layers, for parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make_ruled(kind: str) -> nn.Module:
    """Return a model, the same in every process; ``'odd'`` has a vocabulary that no axis divides evenly."""
    torch.manual_seed(1)
    if kind in ("llama", "tied"):
        return make_llama(tied=kind == "tied")
    if kind == "neox":
        return make_neox()
    if kind == "odd":
        return nn.Sequential(nn.Embedding(VOCABULARY + 1, 24), Block(), Block(), nn.LayerNorm(24), nn.Linear(24, 97))
    if kind == "qwen3":
        return make_small("Qwen3", num_key_value_heads=4, head_dim=12)  # type: ignore[no-any-return]
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(hidden_size=48, intermediate_size=80, num_labels=7, **sizes))


def ruled_loss(model: nn.Module, kind: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of rows of 12 tokens; a ViT sees an image that they make."""
    if kind == "odd":
        logits: torch.Tensor = model(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    if kind != "vit":
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]
    waves = torch.arange(16 * 16).reshape(1, 1, 16, 16) * tokens[:, :3, None, None]
    return model(pixel_values=waves.sin(), labels=tokens[:, 0] % 7).loss  # type: ignore[no-any-return]
