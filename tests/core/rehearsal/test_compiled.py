"""Rehearsals of compiled units: one operator for what is fused, what the partitioner keeps, and no eager runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn import functional as F

import mmfsdp
from mmfsdp.basics.torch_releases import COMPILES_FAKE_TENSORS, torch_has
from mmfsdp.errors import RehearsalError

pytestmark = pytest.mark.skipif(not torch_has(COMPILES_FAKE_TENSORS), reason="torch compiles no fake tensors")
WIDTH, ROWS = 32, 64
WHOLE = 4 * ROWS * WIDTH  # bytes of an activation


class Block(nn.Module):
    """A product between two chains of pointwise operators, of which eager autograd keeps every step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.sin().exp().tanh()).cos().exp().sigmoid()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).view(1, 2, ROWS, WIDTH // 2)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(ROWS, WIDTH)


class Skipped(Block):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def rehearsed(
    block: type[nn.Module], *, change: Callable[[nn.Module], nn.Module] = lambda block: block, **config: Any
) -> mmfsdp.rehearsal.Rehearsal:
    model = nn.Sequential(*(change(block()) for _ in range(3)))
    wrap = {"kind": "module_class", "classes": [block.__name__]}
    return mmfsdp.rehearse({"wrap": wrap, **config}, model, torch.randn(ROWS, WIDTH), mesh=2, device_type="cpu")


def forward_of(step: mmfsdp.rehearsal.Rehearsal, module: str) -> Counter[str]:
    """Count the operators of a block's forward that move bytes, without FSDP's."""
    found = (item for item in step.operators if (item.module, item.phase, item.role) == (module, "forward", "compute"))
    return Counter(item.name for item in found if item.nbytes)


def kept(step: mmfsdp.rehearsal.Rehearsal) -> int:
    """Return the bytes of activations when backward begins."""
    return step.at(dict(step.phases)["backward"] - 1).by_kind["activation"]


def compiled(block: nn.Module) -> nn.Module:
    block.compile(backend="eager")  # a rehearsal knows what training does with it by default
    return block


@pytest.mark.exhaustive
def test_a_chain_is_one_operator() -> None:
    step = rehearsed(Block, compile=True)
    assert forward_of(step, "1") == {"inductor::fused": 2, "aten::addmm": 1}
    fused = [item for item in step.operators if item.module == "1" and item.name == "inductor::fused"]
    assert [item.nbytes for item in fused if item.phase == "forward"] == [2 * WHOLE] * 2  # it reads one and writes one
    assert not step.is_eager_instead


def test_only_what_the_partitioner_keeps_is_kept() -> None:
    # The partitioner keeps the input of each product, its result, and that of the block: backward computes the two
    # exponentials of a block again. The first block's first one needs no gradient, so neither run keeps its result.
    assert kept(rehearsed(Block)) - kept(rehearsed(Block, compile=True)) == 5 * WHOLE


@pytest.mark.sample("compile")
@pytest.mark.parametrize("change", [compiled, torch.compile])
def test_what_users_compile_is_rehearsed_alike(change: Callable[[nn.Module], nn.Module]) -> None:
    found, expected = rehearsed(Block, change=change), rehearsed(Block, compile=True)
    assert found.peak.nbytes == expected.peak.nbytes
    assert [item.nbytes for item in found.operators] == [item.nbytes for item in expected.operators]


def test_attention_is_that_of_the_device() -> None:
    model = nn.Sequential(Attending(), Attending())
    config = {"wrap": {"kind": "module_class", "classes": ["Attending"]}, "compile": True, "precision": "bf16"}
    step = mmfsdp.rehearse(config, model, torch.randn(ROWS, WIDTH), mesh=2, device="a100")
    assert [name for name in forward_of(step, "1") if "attention" in name] == [
        "aten::_scaled_dot_product_flash_attention"
    ]


def test_a_unit_that_runs_eagerly_is_an_error() -> None:
    with pytest.raises(RehearsalError, match=r"torch ran all of it eagerly.*graph_breaks.*fqn='0'"):
        rehearsed(Skipped, compile=True)


def test_another_backend_is_rehearsed_eagerly_and_says_so() -> None:
    step = rehearsed(Block, compile={"backend": "eager"})
    assert step.is_eager_instead
    assert "compiles for the backend inductor" in str(step)
    assert forward_of(step, "1")["aten::tanh"] == 1


@pytest.mark.exhaustive
def test_compiled_models_of_the_process_are_unharmed() -> None:
    block = Block()
    block.compile(backend="eager")
    x = torch.randn(ROWS, WIDTH)
    before = block(x)
    rehearsed(Block, compile=True)
    torch.testing.assert_close(block(x), before)
