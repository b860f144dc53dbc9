"""Parameters that come into a model after it was sharded: their gradients would stay on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.testing import run_ranks, single_rank

BLOCKS = {"kind": "module_class", "classes": "Sequential"}
ENGINES = ["fsdp2", "fsdp1", "replicate"]
SAID = "added to the model after it was sharded"


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def sharded(engine: str) -> tuple[nn.Module, Any]:
    """The model, and the module that has the layers."""
    model = mmfsdp.shard(build(), {"wrap": BLOCKS, "engine": engine})
    return model, getattr(model, "module", model)


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 4), rank + 1.0)).square().sum().backward()


def at_first_forward(rank: int, engine: str) -> str:
    model, layers = sharded(engine)
    layers[1] = nn.Linear(4, 3)
    with torch.no_grad():
        model(torch.ones(1, 4))  # an evaluation trains nothing
    with pytest.raises(ShardStateError) as caught:
        backward(model, rank)
    return caught.value.message


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_head_is_named_before_the_first_training_forward(engine: str) -> None:
    for message in run_ranks(at_first_forward, 2, engine):
        assert "'1.weight', '1.bias', which were " + SAID in message
        assert "then call shard()" in message


def at_clip_or_step(rank: int, engine: str, act: str) -> str:
    model, layers = sharded(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, rank)
    mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    layers.add_module("extra", nn.Linear(2, 2))
    backward(model, rank)
    if act == "new optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif act == "added group":
        optimizer.add_param_group({"params": list(layers.extra.parameters())})
    with pytest.raises(ShardStateError) as caught:
        mmfsdp.clip_grad_norm_(model, 1.0) if act == "clip" else optimizer.step()
    return caught.value.message


@pytest.mark.parametrize("act", ["clip", "new optimizer", "added group"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_later_part_is_named_by_clipping_and_by_a_step(engine: str, act: str) -> None:
    for message in run_ranks(at_clip_or_step, 2, engine, act):
        assert "'extra.weight', 'extra.bias', which were " + SAID in message


def fine(rank: int, change: str) -> bool:
    model: Any = mmfsdp.shard(build(), {"wrap": BLOCKS})
    if change == "frozen":
        model.add_module("extra", nn.Linear(2, 2).requires_grad_(False))
    else:
        extra = nn.Linear(2, 2)
        for param in extra.parameters():
            dist.broadcast(param.data, 0)
        model.add_module("extra", fully_shard(extra))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for _ in range(2):
        backward(model, rank)
        mmfsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    whole = [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in model.parameters()]
    for param in whole:
        first = param.clone()
        dist.broadcast(first, 0)
        if change != "frozen" and not torch.equal(first, param):
            return False
    return True


@pytest.mark.parametrize("change", ["frozen", "sharded by the user"])
def test_what_is_not_trained_or_is_sharded_by_the_user_is_accepted(change: str) -> None:
    assert run_ranks(fine, 2, change) == [True, True]


def with_whole_params(rank: int) -> float:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    backward(model, rank)
    norm = mmfsdp.clip_grad_norm_(model, 1e9)
    with mmfsdp.full_params(model, with_grads=True, writeback=False):
        return abs(float(mmfsdp.clip_grad_norm_(model.parameters(), 1e9)) - float(norm))


def test_whole_parameters_that_are_shown_are_the_model_s_own() -> None:
    assert max(run_ranks(with_whole_params, 2)) < 1e-6


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def resize(model: Any) -> None:
    model.resize_token_embeddings(40)


def add_lora(model: Any) -> None:
    import peft

    ids = torch.arange(8)[None]
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))(input_ids=ids)


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (resize, r"resize_token_embeddings\(40\) was called on a sharded"),
        (add_lora, f"lora_A.default.weight'.* {SAID}"),
    ],
)
def test_methods_of_transformers_and_peft(change: Callable[[Any], None], said: str) -> None:
    """Fails with errors about sizes and DTensors otherwise."""
    with single_rank():
        model = mmfsdp.shard(tiny_llama(), {"wrap": {"kind": "module_class", "classes": "LlamaDecoderLayer"}})
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        with pytest.raises(ShardStateError, match=said):
            change(model)
