"""Proofs hold for models that are sharded right, and fail for one that computes something else on several ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from tests.distributed.models import Tied

import mmfsdp
from mmfsdp.errors import ConfigError

BATCH = torch.empty(4, dtype=torch.int64)
BLOCKS = {"wrap": {"kind": "module_class", "classes": "Block"}}


class Wrong(Tied):
    """Its second block computes something else if there are several ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        x = self.blocks[1](x * (1.01 if dist.get_world_size() > 1 else 1.0))
        return self.head(x) * self.scale


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_model_with_tied_weights_is_proven() -> None:
    proof = mmfsdp.prove("tests.distributed.models:Tied", BATCH, config=BLOCKS, steps=1, accumulate=2)
    assert proof.proven, str(proof)
    assert str(proof).startswith(
        "Proven: Tied computes on 2 ranks what it computes in one process, over 1 steps, and over 1 more from a "
        "checkpoint on 1 rank. "
    )
    assert f"torch {torch.__version__}" in str(proof)
    assert len(proof.trained.compared) > 100
    assert len(proof.resumed.compared) > 100
    assert {item.key.step for item in proof.resumed.compared} == {1}
    assert json.loads(json.dumps(proof.describe()))["proven"] is True


def test_mixed_precision_and_dropout() -> None:
    proof = mmfsdp.prove(Dropping, {"x": torch.empty(2, 3, 8)}, config={"precision": "bf16"}, steps=1)
    assert proof.proven, str(proof)
    assert "with dropout set to 0" in str(proof)


def test_a_model_that_computes_something_else_is_not_proven() -> None:
    proof = mmfsdp.prove(Wrong, BATCH, config=BLOCKS, steps=1)
    assert not proof.proven
    assert proof.trained.first is not None
    assert (proof.trained.first.key.kind, proof.trained.first.key.name) == ("input", "blocks.1[0][0]")
    assert proof.resumed.first is not None  # what was trained is not what the reference has
    assert str(proof).startswith("Not proven: Wrong differs on 2 ranks from one process.")


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="ranks >= 2"):
        mmfsdp.prove(Tied, BATCH, ranks=1)
