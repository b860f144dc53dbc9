"""What is measured on a GPU and forecast without one: models, batches and settings by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.published.hf_models import HfDecoder, HfShape
from benchmarks.published.models import Decoder, Shape
from mmfsdp.rehearsal.running.step import call_with

__all__ = ["CASES", "Case"]

Batch = Mapping[str, tuple[tuple[int, ...], int]]
"""Names of tensors, each with its shape and the number that its integers are below; 0 for floating point numbers."""


@dataclass(frozen=True)
class Case:
    """A step of training.

    Args:
        model: Makes the model.
        batch: What one rank gets in a micro-batch.
        wrap: Names of the classes whose modules are units.
        config: The other settings to shard with.
        ranks: In a world of several, the others are missing: nothing is sent, and kernels and allocations are real.
        accumulate: Micro-batches of a step.
        optimizer: Its name.
        autocast: The dtype of the loop's own `torch.autocast`.
        loss: What the loop does before ``backward()``.
        train: False for a forward alone, with ``loss`` for what the loop does with model and batch.
    """

    model: Callable[[], nn.Module]
    batch: Batch
    wrap: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    accumulate: int = 1
    optimizer: str = "adamw"
    autocast: str | None = None
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    train: bool = True

    def settings(self) -> dict[str, Any]:
        """Return the config to shard with."""
        return {"wrap": {"kind": "module_class", "classes": [*self.wrap]}, **self.config}

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """Return a micro-batch of random numbers on a device."""
        return {
            name: torch.randint(0, below, shape, device=device) if below else torch.randn(shape, device=device)
            for name, (shape, below) in self.batch.items()
        }

    def compute(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        find = self.loss or _own
        if self.autocast is None:
            return find(model, batch)
        with torch.autocast("cuda", getattr(torch, self.autocast)):
            return find(model, batch)


def _own(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model returns."""
    found: torch.Tensor = model(**batch).loss
    return found


def _next_word(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"].flatten())


def _squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).float().square().mean()


def _generated(model: nn.Module, batch: Any) -> torch.Tensor:
    """Append 16 words, each the likeliest, with a cache."""
    tokens, cache = batch["input_ids"], None
    for _ in range(16):
        found = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, tokens = found.past_key_values, found.logits[:, -1:].argmax(-1)
    return tokens


def hugging_face(architecture: str, **settings: Any) -> nn.Module:
    """Return a model of transformers with the sizes of its configuration's defaults but for the settings."""
    import transformers

    network = getattr(transformers, architecture)
    model: nn.Module = network(network.config_class(**settings))
    return model.train()


class Recurrent(nn.Module):
    """A recurrent network between two linear layers."""

    def __init__(self, kind: str, width: int, layers: int, **settings: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.cells = getattr(nn, kind)(width, width, layers, batch_first=True, **settings)
        self.head = nn.Linear(width * (2 if settings.get("bidirectional") else 1), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.cells(self.stem(x))[0])
        return found


LLAMA_1B = Shape(2048, 16, 32, 128256, 8192, kv_heads=8, norm="fused", is_tied=True)
LLAMA_SMALL = Shape(1024, 8, 16, 32000, 4096, norm="fused")
LLAMA_8B = Shape(4096, 32, 32, 128256, 14336, kv_heads=8, norm="fused")
LLAMA_ADAPTED = HfShape(2048, 16, 32, 8, 128256, 8192, rank=16)
MPT_1B = Shape(2048, 24, 16, 50368, 8192, norm="layer", is_gated=False, positions=2048, is_tied=True, packed=True)
BF16 = {"precision": "bf16"}
FULL, OPS = ({"activation_checkpointing": {"mode": mode}} for mode in ("full", "ops"))


def _words(shape: Shape, samples: int, rows: int, **settings: Any) -> Case:
    batch = {"tokens": ((samples, rows), shape.vocabulary)}
    return Case(partial(Decoder, shape, rows), batch, ("Block",), loss=_next_word, **settings)


def _images(samples: int, size: int = 224, labels: int = 1000) -> Batch:
    found = {"pixel_values": ((samples, 3, size, size), 0)}
    return found | ({"labels": ((samples,), labels)} if labels else {})


def _vision(architecture: str, batch: Batch, *wrap: str, config: Any = BF16, **settings: Any) -> Case:
    return Case(partial(hugging_face, architecture, **settings), batch, wrap, config)


_VIT_L = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_labels": 1000,
}
_SWIN_B = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "num_labels": 1000}
_CONVNEXT_L = {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536], "num_labels": 1000}
_SEGFORMER_B3 = {"depths": [3, 4, 18, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
_VIT = ("ViTForImageClassification", _images(64), "ViTLayer")

CASES: dict[str, Case] = {
    "llama 1B, bf16": _words(LLAMA_1B, 2, 4096, config=BF16),
    "llama 1B, bf16, full": _words(LLAMA_1B, 4, 4096, config={**BF16, **FULL}),
    "llama 1B, bf16, ops": _words(LLAMA_1B, 2, 4096, config={**BF16, **OPS}),
    "llama 1B, bf16, compiled": _words(LLAMA_1B, 2, 4096, config={**BF16, "compile": True}),
    "llama 1B, bf16, accumulated": _words(LLAMA_1B, 1, 4096, config=BF16, accumulate=4),
    "llama 1B, bf16, FSDP1": _words(LLAMA_1B, 2, 4096, config={**BF16, "engine": "fsdp1"}),
    "llama 1B, autocast, DDP": _words(LLAMA_1B, 1, 4096, config={"engine": "replicate"}, autocast="bfloat16"),
    "llama 1B, fp32": _words(LLAMA_1B, 1, 2048),
    "llama 0.2B, bf16": _words(LLAMA_SMALL, 8, 2048, config=BF16),
    "llama 0.2B, bf16, 64 ranks": _words(LLAMA_SMALL, 8, 2048, config=BF16, ranks=64),
    "llama 0.2B, bf16, FSDP1": _words(LLAMA_SMALL, 8, 2048, config={**BF16, "engine": "fsdp1"}),
    "llama 0.2B, bf16, offloaded": _words(LLAMA_SMALL, 8, 2048, config={**BF16, "cpu_offload": True}),
    "llama 1B, bf16, SGD": _words(LLAMA_1B, 2, 4096, config=BF16, optimizer="sgd-momentum"),
    "llama 1B, bf16, 8 ranks": _words(LLAMA_1B, 2, 4096, config=BF16, ranks=8),
    "llama 8B, bf16, 64 ranks": _words(LLAMA_8B, 1, 2048, config=BF16, ranks=64),
    "llama 8B, bf16, full, 64 ranks": _words(LLAMA_8B, 1, 8192, config={**BF16, **FULL}, ranks=64),
    "llama 1B, bf16, evaluated": _words(LLAMA_1B, 4, 4096, config=BF16, train=False),
    "llama 1B, bf16, adapters": Case(
        partial(HfDecoder, LLAMA_ADAPTED, 4096),
        {"tokens": ((2, 4096), 128256), "labels": ((2, 4096), 128256)},
        ("HfBlock", "Factor"),
        {"engine": "fsdp1"},
        loss=call_with,
    ),
    "MPT 1B, bf16": _words(MPT_1B, 4, 2048, config=BF16),
    "GPT-2 medium, bf16": Case(
        partial(hugging_face, "GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16, use_cache=False),
        {"input_ids": ((8, 1024), 50257), "labels": ((8, 1024), 50257)},
        ("GPT2Block",),
        BF16,
    ),
    "GPT-2 medium, bf16, generating": Case(
        partial(hugging_face, "GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16),
        {"input_ids": ((32, 512), 50257)},
        ("GPT2Block",),
        BF16,
        loss=_generated,
        train=False,
    ),
    "BERT-large, bf16": Case(
        partial(
            hugging_face,
            "BertForMaskedLM",
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        {"input_ids": ((32, 512), 30522), "labels": ((32, 512), 30522)},
        ("BertLayer",),
        BF16,
    ),
    "Whisper-small, bf16": Case(
        partial(
            hugging_face,
            "WhisperForConditionalGeneration",
            d_model=768,
            encoder_layers=12,
            decoder_layers=12,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
            use_cache=False,
        ),
        {"input_features": ((8, 80, 3000), 0), "labels": ((8, 256), 50000)},
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        BF16,
    ),
    "ViT-L, bf16": _vision(*_VIT, **_VIT_L),
    "ViT-L, fp32": _vision(*_VIT, config={}, **_VIT_L),
    "ViT-L, autocast": replace(_vision(*_VIT, config={}, **_VIT_L), autocast="bfloat16"),
    "ViT-L, bf16, compiled": _vision(*_VIT, config={**BF16, "compile": True}, **_VIT_L),
    "MAE-L, bf16": _vision(
        "ViTMAEForPreTraining",
        _images(64, labels=0),
        "ViTMAELayer",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "Swin-B, bf16": _vision("SwinForImageClassification", _images(64), "SwinLayer", **_SWIN_B),
    "ConvNeXt-L, bf16": _vision("ConvNextForImageClassification", _images(64), "ConvNextLayer", **_CONVNEXT_L),
    "ConvNeXt-L, fp32": _vision(
        "ConvNextForImageClassification", _images(32), "ConvNextLayer", config={}, **_CONVNEXT_L
    ),
    "ResNet-50, fp32": _vision("ResNetForImageClassification", _images(128), "ResNetStage", config={}, num_labels=1000),
    "ResNet-50, bf16": _vision("ResNetForImageClassification", _images(256), "ResNetStage", num_labels=1000),
    "SegFormer-B3, bf16": _vision(
        "SegformerForSemanticSegmentation",
        {"pixel_values": ((8, 3, 512, 512), 0), "labels": ((8, 512, 512), 150)},
        "SegformerLayer",
        num_labels=150,
        **_SEGFORMER_B3,
    ),
    **{
        f"{kind} 1024 x {layers}, {name}": Case(
            partial(Recurrent, kind, 1024, layers, **extra),
            {"x": ((64, 512, 1024), 0)},
            ("Recurrent",),
            config,
            loss=_squares,
        )
        for kind, layers, name, config, extra in (
            ("LSTM", 2, "fp32", {}, {}),
            ("LSTM", 3, "bf16", BF16, {"bidirectional": True}),
            ("LSTM", 2, "dropout", {}, {"dropout": 0.1}),
            ("GRU", 3, "fp32", {}, {}),
            ("GRU", 2, "bf16", BF16, {"bidirectional": True}),
            ("RNN", 2, "fp32", {}, {}),
        )
    },
}
