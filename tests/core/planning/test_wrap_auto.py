"""`wrap: auto` on models built as the libraries that people use build them: which modules become units, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.planning import repeated_classes


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Layer(nn.Module):
    """A transformer layer; a cross-attention makes it mmcv's decoder layer, with its parts in lists."""

    def __init__(self, width: int, attentions: int = 1, experts: int = 0) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(width) for _ in range(attentions))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        if experts:
            self.experts = nn.ModuleList(Feed(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.norms[0](x))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class DecoderLayer(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width, attentions=2)


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.downsample = nn.Linear(width, 2 * width)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4)
        self.layers = nn.ModuleList(Stage(8 * 2**i, depth) for i, depth in enumerate((2, 2, 6, 2)))
        self.head = nn.Linear(64, 10)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 1), nn.Conv2d(outside, outside, 3)
        self.downsample = None if inside == outside else nn.Sequential(nn.Conv2d(inside, outside, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.conv1(x))


class ResNet(nn.Module):
    """Layers of two blocks, of which the first alone changes the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7)
        self.layer1 = nn.Sequential(Bottleneck(8, 8), Bottleneck(8, 8))
        self.layer2 = nn.Sequential(Bottleneck(8, 16), Bottleneck(16, 16))
        self.layer3 = nn.Sequential(Bottleneck(16, 32), Bottleneck(32, 32))
        self.fc = nn.Linear(32, 10)


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = ResNet()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(16) for _ in range(3))})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(DecoderLayer(16) for _ in range(3))})
        self.heads = nn.ModuleList(Feed(16) for _ in range(2))


class Gpt(nn.Module):
    """Hugging Face's way: the inner model declares its blocks."""

    _no_split_modules: Any = None

    def __init__(self, declared: list[str] | None, words: int = 1000, tied: bool = True, depth: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(words, 16), "wpe": nn.Embedding(8, 16)})
        self.transformer["h"] = nn.ModuleList(Layer(16, experts=4) for _ in range(depth))
        self.lm_head = nn.Linear(16, words, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self._no_split_modules = declared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](x)
        for layer in self.transformer["h"]:
            x = layer(x)
        return self.lm_head(x)


class TwoTasks(nn.Module):
    """A rank may train one task while another trains the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.heads = nn.ModuleList(Feed(16) for _ in range(2))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(Feed(16) for _ in range(4))


class Titan(nn.Module):
    """torchtitan's way: blocks in a dict, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(place): Layer(16) for place in range(3)})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def several(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{place}" for place in range(count)]


SWIN = [f"layers.{stage}.blocks.{place}" for stage, depth in enumerate((2, 2, 6, 2)) for place in range(depth)]
RESNET = [f"layer{layer}.{place}" for layer in (1, 2, 3) for place in (0, 1)]
DETR_BACKBONE = [f"backbone.{fqn}" for fqn in RESNET]
TIED = "transformer.wte + lm_head"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Swin(), SWIN),
        (ResNet(), RESNET),
        (
            Detr(),
            [*(f"backbone.{fqn}" for fqn in RESNET), *several("encoder.layers", 3), *several("decoder.layers", 3)],
        ),
        (Gpt(None), [TIED, *several("transformer.h", 3)]),
        (Gpt(["Layer"]), [TIED, *several("transformer.h", 3)]),
        (Gpt(["Layer"], depth=1), [TIED, "transformer.h.0"]),
        (Gpt(None, tied=False), ["transformer.wte", *several("transformer.h", 3), "lm_head"]),
        (Gpt(None, words=9, tied=False), several("transformer.h", 3)),
        (Titan(), several("layers", 3)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3), several("layers", 3)),
        (mlp(), []),
        (Gpt(None, depth=1), []),
        (Gpt([], depth=1), []),
        (TwoTasks(), []),
        (Mixture(), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_units(model: nn.Module, expected: Iterable[str]) -> None:
    plan = mmfsdp.plan(model, {}, 2)
    found = [" + ".join(unit.fqns) for unit in plan.units if not unit.is_root]
    assert sorted(found) == sorted(expected)
    assert plan.units[-1].is_root


def test_the_plan_says_what_it_chose_and_why() -> None:
    plan = mmfsdp.plan(Gpt(["Layer"], tied=False), {}, 2)
    assert {unit.fqn: unit.matched_by for unit in plan.units} == {
        "transformer.wte": "auto: as large as a block",
        **dict.fromkeys(several("transformer.h", 3), "auto: _no_split_modules of Gpt"),
        "lm_head": "auto: as large as a block",
        "": "the whole model",
    }
    assert plan.table().endswith(
        "note (wrap): wrap auto: 3 x Layer (_no_split_modules of Gpt); also 'transformer.wte', 'lm_head', as large as "
        "a block. wrap: none makes one unit of all."
    )
    assert mmfsdp.plan(Swin(), {}, 2).notes[-1].text.startswith("wrap auto: 12 x Layer (repeated in layers.0.blocks)")
    assert "the model repeats no blocks, so all of it is one shard unit" in mmfsdp.plan(mlp(), {}, 2).table()


def test_none_is_one_unit_and_says_nothing() -> None:
    for wrap in ("none", None):
        plan = mmfsdp.plan(Swin(), {"wrap": wrap}, 2)
        assert (len(plan.units), plan.notes) == (1, ())


def test_ignored_modules_are_not_blocks() -> None:
    plan = mmfsdp.plan(Swin(), {"sharding": {"ignored_modules": ["layers.2"]}}, 2)
    assert [unit.fqn for unit in plan.units[:-1]] == [fqn for fqn in SWIN if not fqn.startswith("layers.2")]


def test_auto_beside_other_policies() -> None:
    wrap = {"kind": "any_of", "policies": ["auto", {"kind": "module_name", "patterns": "stem"}]}
    assert [unit.fqn for unit in mmfsdp.plan(Swin(), {"wrap": wrap}, 2).units] == ["stem", *SWIN, ""]


def test_checkpointing_recomputes_blocks_and_no_embedding() -> None:
    plan = mmfsdp.plan(Gpt(None, tied=False), {"activation_checkpointing": "full"}, 2)
    assert plan.activation_checkpointing is not None
    assert list(plan.activation_checkpointing.fqns) == several("transformer.h", 3)


def test_the_choice_is_the_same_from_meta() -> None:
    with torch.device("meta"):
        model = Swin()
    assert mmfsdp.plan(model, {}, 8) == mmfsdp.plan(Swin(), {}, 8)


def test_repeated_classes() -> None:
    assert repeated_classes(Detr()) == ["Bottleneck", "DecoderLayer", "Layer"]
    assert repeated_classes(mlp()) == []
