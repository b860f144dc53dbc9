"""Compiled blocks of a sharded model, against those of raw ``fully_shard``: graphs, breaks, and weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import mmfsdp
from mmfsdp.testing import run_ranks

DIM = 4

Blocks = Callable[[nn.Module], nn.ModuleList]
Shard = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A unit with a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.down(self.inner(x))


class Recomputing(Block):
    """As the layers of transformers: a call of the layer is a region of recomputation."""

    def __call__(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(super().__call__, x, use_reentrant=False)
        return super().__call__(x)


class Parts(Block):
    """Recomputes a part of itself, which is what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(checkpoint(self.part, x, use_reentrant=False))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, layers: int = 9, *, wrapped: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        blocks = [block() for _ in range(layers)]
        self.blocks = nn.ModuleList([checkpoint_wrapper(block) for block in blocks] if wrapped else blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Llama(nn.Module):
    """A causal model of transformers that takes the same inputs."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=9, use_cache=False, **sizes))
        if recomputes:
            self.net.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def blocks(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.net.model.layers
        return layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(input_ids=(x * 8).long().abs() % 8).logits
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,  # more blocks than dynamo compiles the code of a forward
    "two": lambda: Net(layers=2),
    "48": lambda: Net(layers=48),
    "48 recomputing": lambda: Net(Recomputing, 48),
    "checkpoint_wrapper": lambda: Net(wrapped=True),
    "recomputing": lambda: Net(Recomputing),
    "parts": lambda: Net(Parts),
    "llama": lambda: Llama(recomputes=False),
    "llama-recomputing": lambda: Llama(recomputes=True),
}


def in_place(model: nn.Module, **arguments: Any) -> None:
    for block in model.blocks:
        block.compile(**arguments)


def replaced(model: nn.Module, **arguments: Any) -> None:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, **arguments)


def inside(model: nn.Module, **arguments: Any) -> None:
    for block in model.blocks:
        next(child for child in block.children() if isinstance(child, Block)).compile(**arguments)


def whole(model: nn.Module, **arguments: Any) -> None:
    model.compile(**arguments)


COMPILES: dict[str, Callable[..., None]] = {
    "in place": in_place,
    "replaced": replaced,
    "inside": inside,
    "whole": whole,
}


def raw(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def raw_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


CLASSES = {"recomputing": "Recomputing", "parts": "Parts", "48 recomputing": "Recomputing"}


def ours(name: str, how: str, when: str, settings: dict[str, Any]) -> Shard:
    kind = "LlamaDecoderLayer" if "llama" in name else CLASSES.get(name, "Block")
    wrap = {"kind": "module_class", "classes": kind}
    if how == "inside" or (name == "checkpoint_wrapper" and when == "after"):
        # The unit is what is compiled, or around it: nobody can gather within a graph.
        wrap = {"kind": "module_name", "patterns": "blocks.*"}
    return lambda model: mmfsdp.shard(model, {"wrap": {"kind": "none"} if how == "whole" else wrap, **settings})


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Train a step with each batch, and predict once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batches[0])


def counted(
    alone: nn.Module, shard: Shard, how: str, when: str, fullgraph: bool, batches: list[torch.Tensor]
) -> tuple[dict[str, Any], nn.Module]:
    """What the compiler did, and the trained model."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()  # dynamo goes through torch's table of modules, which models that die meanwhile leave
    backend, model = CompileCounterWithBackend("eager"), copy.deepcopy(alone)
    compile = COMPILES[how]
    if when == "before":
        compile(model, backend=backend, fullgraph=fullgraph)
    model = shard(model)
    if when == "after":
        compile(model, backend=backend, fullgraph=fullgraph)
    train(model, batches)
    counters = torch._dynamo.utils.counters
    limits = sum(counters["recompile_limit"].values())
    return {"graphs": backend.frame_count, "breaks": sum(counters["graph_break"].values()), "limits": limits}, model


Case = tuple[str, str, str, bool]


def compare(rank: int, cases: list[Case], settings: dict[str, Any]) -> list[tuple[Any, Any, float] | None]:
    """For each case what the compiler does with raw ``fully_shard`` and with us, and how far weights are off.

    None where torch cannot compile what raw ``fully_shard`` or FSDP1 made.
    """
    found: list[tuple[Any, Any, float] | None] = []
    for name, how, when, fullgraph in cases:
        torch.manual_seed(0)
        alone = MODELS[name]()
        batches = list(torch.randn(2, 2 * dist.get_world_size(), 3) if "llama" in name else torch.randn(2, 4, DIM))
        own = [batch.chunk(dist.get_world_size())[rank] for batch in batches]
        same = MODELS["checkpoint_wrapper"]() if "activation_checkpointing" in settings else alone
        same.load_state_dict(alone.state_dict())
        shard = fully_shard if how == "whole" else raw_fsdp1 if "engine" in settings else raw
        try:
            expected, _ = counted(same, shard, how, when, fullgraph, own)
        except torch._dynamo.exc.Unsupported:  # of torch's own hooks
            found.append(None)
            continue
        counts, model = counted(alone, ours(name, how, when, settings), how, when, fullgraph, own)
        weights = mmfsdp.model_state_dict(model, rank0_only=False)
        weights = {key.replace("_orig_mod.", ""): value for key, value in weights.items()}
        train(alone, batches)
        error = max((weights[key] - want).abs().max().item() for key, want in alone.state_dict().items())
        found.append((expected, counts, error))
    return found


graphs: list[Any] = []


def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend of torch.compile that a plan names by reference."""
    graphs.append(graph)
    return graph.forward


def by_plan(rank: int, settings: dict[str, Any]) -> tuple[int, float]:
    """How many graphs a plan that compiles units makes, and how far weights are off."""
    torch.compiler.reset()
    graphs.clear()
    torch.manual_seed(0)
    alone = Net()
    compile = {"backend": f"{__name__}:keep_graph", "fullgraph": True}
    model = ours("plain", "", "", {"compile": compile, **settings})(copy.deepcopy(alone))
    batches = list(torch.randn(2, 4, DIM))
    train(model, [batch.chunk(2)[rank] for batch in batches])
    train(alone, batches)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    return len(graphs), max((weights[key] - want).abs().max().item() for key, want in alone.state_dict().items())


EVERYWHERE = [(how, when) for how in ("in place", "replaced") for when in ("before", "after")]


def check(cases: list[Case], settings: dict[str, Any] | None = None, *, ranks: int = 1) -> None:
    for found in run_ranks(compare, ranks, cases, settings or {}):
        for case, outcome in zip(cases, found, strict=True):
            if outcome is None:  # some, with torch 2.9 and 2.15
                assert not torch.__version__.startswith("2.13."), case
                continue
            expected, counts, error = outcome
            assert counts == expected, case
            assert (counts["breaks"], counts["limits"]) == (0, 0), case
            assert error == pytest.approx(0, abs=1e-5), case


@pytest.mark.sample("recomputing")
@pytest.mark.parametrize("model", ["plain", "checkpoint_wrapper", "recomputing", "llama", "llama-recomputing"])
def test_blocks(model: str) -> None:
    """Fails if modules of an open unit differ from those of raw ``fully_shard`` by anything."""
    # Raw `fully_shard` fails if torch.compile() is given a sharded module whose call begins a recomputation.
    places = EVERYWHERE if model != "recomputing" else EVERYWHERE[:3]
    if "llama" in model:  # each way and each moment once
        places = [EVERYWHERE[0], EVERYWHERE[3]]
    check([(model, how, when, True) for how, when in places])


@pytest.mark.exhaustive
def test_on_two_ranks() -> None:
    check([("plain", "in place", "before", True), ("recomputing", "in place", "after", False)], ranks=2)


@pytest.mark.exhaustive
def test_a_whole_model_in_one_graph() -> None:
    """Hooks of the root are not compiled. Fails if they are: torch cannot compile a question for inference mode."""
    check([("two", "whole", when, True) for when in ("before", "after")])


@pytest.mark.exhaustive
def test_many_blocks() -> None:
    check([("48", "in place", "before", True), ("48 recomputing", "in place", "after", False)])


@pytest.mark.exhaustive
def test_checkpointing_of_the_plan() -> None:
    """As many graphs as blocks in torch's own wrapper."""
    cases = [("plain", how, when, True) for how, when in (EVERYWHERE[1], EVERYWHERE[2])]
    check(cases, {"activation_checkpointing": "full"})


@pytest.mark.exhaustive
def test_engine_fsdp1() -> None:
    check([("plain", how, when, True) for how, when in EVERYWHERE[:3]], {"engine": "fsdp1"})


@pytest.mark.sample("settings1")
@pytest.mark.parametrize("settings", [{}, {"engine": "fsdp1"}, {"activation_checkpointing": "full"}])
def test_compiled_by_the_plan(settings: dict[str, Any]) -> None:
    for graphs, error in run_ranks(by_plan, 2, settings):
        assert graphs == 2  # with and without gradients
        assert error == pytest.approx(0, abs=1e-5)


@pytest.mark.exhaustive
def test_what_a_unit_recomputes() -> None:
    """A compiled module inside of a unit, which recomputes it in backward. Fails without `UnitGate.begin_backward`."""
    check([(model, "inside", when, True) for model in ("parts", "checkpoint_wrapper") for when in ("before", "after")])
