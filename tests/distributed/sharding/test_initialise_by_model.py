"""Models that initialise in a method of their own: from meta they get what the unsharded model gets, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import PlanError
from mmfsdp.sharding.materialise import _module_seed
from mmfsdp.sharding.meta import parameters_on_meta
from mmfsdp.testing import run_ranks

Weights = dict[str, torch.Tensor]
WIDTH, DEPTH, WORDS = 64, 4, 300
BLOCKS = {"kind": "module_class", "classes": "Block"}


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, and without reset_parameters, as GPT-2 has it."""

    def __init__(self, outside: int, inside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inside, outside)), nn.Parameter(torch.empty(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class NewGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.c_attn(x).chunk(3, -1)
        return self.c_proj(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH), NewGELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """Scales ``c_proj`` in the pass of the module above it, which owns no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, Conv1D)):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        for name, param in module.named_parameters():
            if name == "c_proj.weight":
                param.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def on_meta(kind: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return kind()


def unsharded(kind: Callable[[], nn.Module], init: Callable[[Any], Callable[[nn.Module], Any]]) -> Weights:
    """The whole model, every module passed to the function with its own seed, children before parents."""
    model = on_meta(kind).to_empty(device="cpu")
    if hasattr(model, "lm_head"):
        model.lm_head.weight = model.wte.weight

    def visit(fqn: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child)
        torch.manual_seed(_module_seed(0, fqn))
        init(model)(module)

    with torch.no_grad():
        visit("", model)
    return dict(model.state_dict())


def own(model: Any) -> Callable[[nn.Module], Any]:
    function: Callable[[nn.Module], Any] = model._init_weights
    return function


def sharded(rank: int, config: dict[str, Any]) -> Weights:
    model = on_meta(Gpt2)
    torch.manual_seed(rank)
    config = {**config, "init": {"sync_states": False}}
    return mmfsdp.model_state_dict(mmfsdp.shard(model, config, param_init_fn=own(model)), rank0_only=False)


def same(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sample("2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gpt2_from_meta_has_the_weights_of_the_unsharded_model(world_size: int) -> None:
    """Fails if modules without parameters are not passed to the function: c_proj has a deviation of 0.020 then."""
    want = unsharded(Gpt2, own)
    for name, weight in want.items():
        if name.endswith("c_proj.weight"):
            assert float(weight.std()) == pytest.approx(0.02 / math.sqrt(2 * DEPTH), rel=0.05)
    configs: list[dict[str, Any]] = [{"wrap": "none"}, {"wrap": "auto"}, {"wrap": BLOCKS}]
    configs += [
        {"wrap": BLOCKS, "engine": "fsdp1"},
        {"wrap": {"kind": "module_class", "classes": ["Mlp", "Attention"]}},
    ]
    for config in configs:
        for weights in run_ranks(sharded, world_size, config):
            assert same(weights, want)


def refused(rank: int, config: dict[str, Any], given: bool, kind: type[nn.Module]) -> str:
    model = on_meta(kind)
    with pytest.raises(PlanError) as caught:
        mmfsdp.shard(model, config, param_init_fn=own(model) if given else None)
    return str(caught.value)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_what_a_parent_sets_in_another_unit_is_refused(engine: str) -> None:
    """Fails if ``param.data.normal_()`` goes unnoticed: it leaves version counters as they are."""
    config = {"wrap": {"kind": "module_name", "patterns": "**.c_proj"}, "engine": engine}
    for message in run_ranks(refused, 2, config, True, Gpt2):
        assert "changed 'c_proj.weight', which is sharded already" in message
        assert "or wrap both in one unit" in message


class Bert(nn.Module):
    """Only layers that have reset_parameters, which would give embeddings a deviation of 1 instead of 0.02."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "weight"):
            module.weight.data.normal_(0.0, 0.02)


class Titan(nn.Module):
    """Initialises everything at once, torchtitan's way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def init_weights(self) -> None:
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Gpt2, "Give param_init_fn=model._init_weights for one module, or build the model with weights."),
        (Bert, "Bert is on the meta device and initialises its weights in Bert._init_weights; reset_parameters() of"),
        (Titan, "in Titan.init_weights; reset_parameters() of its layers would give them other values. Give a"),
    ],
)
def test_a_model_with_a_method_of_its_own_is_not_initialised_without_it(kind: type[nn.Module], message: str) -> None:
    """Fails, in silence, if layers are reset to their own defaults."""
    for told in run_ranks(refused, 2, {}, False, kind):
        assert message in told


def transformer(rank: int, wrap: str) -> Weights:
    model = mmfsdp.shard(on_meta(Xavier), {"wrap": wrap, "init": {"sync_states": False}})
    return mmfsdp.model_state_dict(model, rank0_only=False)


class Xavier(nn.Transformer):
    """torch's own: its reset sets the weights of all layers below, and it owns none."""

    def __init__(self) -> None:
        super().__init__(8, 2, 2, 2, 16, batch_first=True)


def reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


def refused_transformer(rank: int) -> str:
    with pytest.raises(PlanError) as caught:
        mmfsdp.shard(on_meta(Xavier), {"wrap": "auto"})
    return str(caught.value)


def test_a_parents_reset_has_the_last_word_or_is_refused() -> None:
    want = unsharded(Xavier, lambda model: reset)
    for world_size in (1, 2):
        for weights in run_ranks(transformer, world_size, "none"):
            assert same(weights, want)
    for message in run_ranks(refused_transformer, 2):
        assert "Initialising Xavier changed 'encoder.layers.0.self_attn.in_proj_weight', which is" in message


def with_real_weights(rank: int) -> bool:
    model: Any = on_meta(Gpt2)
    model.ln_f = nn.LayerNorm(WIDTH, device="cpu")
    nn.init.constant_(model.ln_f.weight, 7.0)
    mmfsdp.shard(model, {}, param_init_fn=own(model))
    state = mmfsdp.model_state_dict(model, rank0_only=False)
    return bool((state["ln_f.weight"] == 7.0).all())


def test_what_has_weights_keeps_them() -> None:
    assert run_ranks(with_real_weights, 2) == [True, True]


def by_lambda(rank: int) -> bool:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4, device="meta")), nn.ReLU())
    mmfsdp.shard(model, {}, param_init_fn=lambda module: module.reset_parameters())
    return not any(param.is_meta for param in model.parameters())


def test_a_function_that_knows_layers_only_is_enough_for_containers() -> None:
    assert run_ranks(by_lambda, 2) == [True, True]


def emptying(rank: int) -> str:
    """What torch's FSDP1 was often given, on parents as well."""
    model = on_meta(Gpt2)
    with pytest.raises(PlanError) as caught:
        mmfsdp.shard(model, {}, param_init_fn=lambda module: module.to_empty(device="cpu"))
    return str(caught.value)


def test_a_parent_that_empties_what_is_sharded_is_refused() -> None:
    """Fails, in silence, if only writes are looked for: other storage takes the place of the shards."""
    for message in run_ranks(emptying, 2):
        assert "which is sharded already" in message


def from_the_first_rank(rank: int) -> Weights:
    torch.manual_seed(0)
    if rank == 0:
        model = Gpt2()
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    else:
        model = on_meta(Gpt2)
    want = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
    got = mmfsdp.model_state_dict(mmfsdp.shard(model, {}), rank0_only=False)
    assert rank or same(got, want)
    return got


def test_the_first_rank_alone_needs_weights() -> None:
    first, second = run_ranks(from_the_first_rank, 2)
    assert same(first, second)


class Positions(nn.Module):
    """A buffer of integers that the constructor alone sets, as BERT's position_ids and Swin's relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("position_ids", torch.arange(8))

    def reset_parameters(self) -> None:
        pass


def positions(rank: int, buffers: str) -> str | list[int]:
    if buffers == "real":
        with parameters_on_meta():
            model: nn.Module = Positions()
    else:
        model = on_meta(Positions)
    try:
        found: list[int] = mmfsdp.shard(model, {"init": {"sync_states": False}}).position_ids.tolist()  # type: ignore[operator, union-attr]
    except PlanError as error:
        return str(error)
    return found


def test_a_buffer_that_nobody_sets_is_refused_and_not_zero() -> None:
    """Fails, in silence, if only NaN tells: integers have none."""
    for message in run_ranks(positions, 2, "meta"):
        assert "left 'position_ids' without a value." in message
        assert "build the model under mmfsdp.parameters_on_meta()" in message
    assert run_ranks(positions, 2, "real") == [list(range(8))] * 2
