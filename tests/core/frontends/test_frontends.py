"""Models by path: a checkpoint, of which names and shapes are known, and a config of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.frontends import build_model
from mmfsdp.planning import estimate_memory

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 64}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8)), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mlp(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.Sequential(*self.layers)(self.embed(x)))


@pytest.mark.parametrize("config", [{}, {"sharding": {"strategy": "HYBRID_SHARD"}}, {"engine": "replicate"}])
def test_a_checkpoint_alone_gives_the_static_part(tmp_path: Path, config: dict[str, object]) -> None:
    model = Net().double()
    path = tmp_path / "epoch_1.pth"
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "meta": {}}, path)
    built, source = build_model(str(path))
    assert source is None
    assert [(name, param.shape, param.device.type) for name, param in built.named_parameters()] == [
        (name, param.shape, "meta") for name, param in model.named_parameters()
    ]
    assert [name for name, _ in built.named_buffers()] == [name for name, _ in model.named_buffers()]
    truth, plan = (mmfsdp.plan(it, config, (2, 3) if config.get("sharding") else 6) for it in (model, built))
    assert [unit.fqn for unit in plan.units] == [unit.fqn for unit in truth.units]
    for rank in range(6):
        assert estimate_memory(plan, "adamw", rank) == estimate_memory(truth, "adamw", rank)
    with pytest.raises(ConfigError, match="A checkpoint has no forward"):
        mmfsdp.rehearse(None, built, torch.empty(1))


def test_a_config_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **SIZES}))
    model, _ = build_model(str(tmp_path))
    assert type(model) is transformers.LlamaForCausalLM
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.bfloat16, "meta")}
    tokens = torch.empty(2, 16, dtype=torch.int64)
    step = mmfsdp.rehearse(None, model, {"input_ids": tokens, "labels": tokens}, mesh=2)
    assert {"model.layers.0", "model.layers.1"} <= {item.unit for item in step.collectives}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **SIZES, "architectures": ["LlamaForNothing"]}))
    with pytest.raises(ConfigError, match=r"LlamaForNothing.*write a factory: package.module:function"):
        build_model(str(tmp_path / "config.json"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        build_model(str(tmp_path))
