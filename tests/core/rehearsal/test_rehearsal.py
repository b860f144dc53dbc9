"""Rehearsals in one process: what they record of a small model, worked out by hand, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, MeshError, PlanError, RehearsalError
from mmfsdp.planning import estimate_memory
from mmfsdp.rehearsal import KINDS, Allocation, Rehearsal
from mmfsdp.rehearsal.allocator.accounting import held_at, highest, series, shares
from mmfsdp.rehearsal.allocator.caching import CachingAllocator
from mmfsdp.rehearsal.allocator.device_memory import CONTEXT, UNCERTAIN, beside_allocator, taken_ranges
from mmfsdp.rehearsal.allocator.nccl_memory import NCCL_LIBRARY, alone_bytes, communicator_bytes
from mmfsdp.rehearsal.allocator.replaying import Replayed, replayed
from mmfsdp.rehearsal.allocator.waiting import released_late
from mmfsdp.rehearsal.recording.step_records import COPIES, TO_CPU, TO_DEVICE
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.testing import single_rank

WRAP = {"wrap": {"kind": "module_class", "classes": "Block"}}
OFFLOADED = {"precision": "bf16", "cpu_offload": True}


class Block(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.up, self.gelu, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(32, 5, bias=False)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x * self.scale)
        return self.head(x)


def rehearse(config: dict[str, Any] | None = None, **settings: Any) -> Rehearsal:
    settings = {"mesh": 4, "device_type": "cpu", **settings}
    return mmfsdp.rehearse({**WRAP, **(config or {})}, Net(), torch.randn(64, 32), **settings)


@pytest.fixture(scope="module")
def step() -> Rehearsal:
    return rehearse()


def test_what_is_there_between_steps(step: Rehearsal) -> None:
    elements = sum(param.numel() for param in Net().parameters())
    shard = (elements - 5 * 32) // 4 + 2 * 32  # the head has 5 rows: 2 on the first rank
    tensors = sum(1 for _ in Net().parameters())
    assert dict(step.static) == {
        "parameter": 4 * shard,
        "buffer": 4 * 32,
        "optimizer state": 2 * 4 * shard + 4 * tensors,
        "input": 4 * 64 * 32,
    }


def test_activations_are_those_that_autograd_keeps(step: Rehearsal) -> None:
    backward = next(begin for name, begin in step.phases if name == "backward")
    held = {(name, kind): size for name, kind, size, _ in step.held(backward - 1)}
    rows = 4 * 64  # bytes per column of the batch
    # Of each block: its scaled input, what goes into GELU and what comes out of it.
    assert held["blocks.{0..2}.up", "activation"] == held["blocks.{0..2}.gelu", "activation"] == 3 * rows * 128
    assert step.at(backward - 1).by_kind["activation"] >= 3 * rows * (2 * 128 + 32)


def test_collectives_in_order(step: Rehearsal) -> None:
    gathered = [item.unit for item in step.collectives if item.name == "all_gather"]
    assert gathered == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.2", "blocks.1", "blocks.0"]
    reduced = [item for item in step.collectives if item.name == "reduce_scatter"]
    # The batch needs no gradient, so the first block is reduced when backward ends, after the root.
    assert [item.unit for item in reduced] == ["blocks.2", "blocks.1", "", "blocks.0"]
    whole = 4 * sum(param.numel() for param in Block().parameters())
    head = 4 * 8 * 32  # 5 rows, padded to 2 on each of 4 ranks
    assert [item.nbytes for item in reduced] == [whole, whole, head, whole]
    assert {(item.ranks, item.stride) for item in reduced} == {(4, 1)}
    assert [item.phase for item in step.collectives if item.name == "reduce_scatter"] == ["backward"] * 4


def test_the_peak_is_the_most_that_is_held_at_a_time(step: Rehearsal) -> None:
    assert step.peak.nbytes == sum(step.peak.by_kind.values()) == sum(row[2] for row in step.held())
    assert step.peak.nbytes >= max(sum(counts.values()) for _, counts in step.timeline(7))
    assert step.peak.nbytes == max(sum(counts.values()) for _, counts in step.timeline())
    assert [*step.peak.by_kind] == [kind for kind in KINDS if kind in step.peak.by_kind]
    assert step.at(step.last).by_kind == step.static


def test_activation_checkpointing_keeps_less_and_recomputes(step: Rehearsal) -> None:
    full = rehearse({"activation_checkpointing": {"mode": "full"}})
    begin = next(moment for name, moment in full.phases if name == "backward")
    assert full.at(begin - 1).by_kind["activation"] < step.at(begin - 1).by_kind["activation"] / 3
    assert any(item.kind == "recomputed" for item in full.allocations)
    assert not any(item.kind == "recomputed" for item in step.allocations)


def test_accumulation_reduces_once_and_keeps_whole_gradients(step: Rehearsal) -> None:
    twice = rehearse(accumulate=2)
    count = {name: sum(item.name == name for item in twice.collectives) for name in ("reduce_scatter", "all_gather")}
    assert count["reduce_scatter"] == 4
    assert [name for name, _ in twice.phases].count("forward") == 2
    assert twice.peak.by_kind["gradient"] > step.peak.by_kind.get("gradient", 0)


def test_an_accelerator_computes_many_tensors_at_a_time(step: Rehearsal) -> None:
    def temporary(found: Rehearsal) -> int:
        kinds = [item for item in found.allocations if item.kind == "optimizer temporary"]
        return highest(kinds)[0]

    many, wide = rehearse(device_type="cuda"), rehearse(device_type="cuda", mesh=64)
    assert temporary(many) > 2 * temporary(step)
    # Only of shards: DTensor may compute whole shapes on fake tensors of its own.
    assert temporary(wide) < temporary(many) < 3 * many.static["parameter"]


def test_on_an_accelerator_attention_and_dropout_keep_little() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(2, 128, 1, 48).transpose(1, 2).chunk(3, -1)
            found = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
            return nn.functional.dropout(found, 0.1)

    def kept(device_type: str) -> int:
        found = mmfsdp.rehearse(None, Attends(), torch.randn(2, 128, 16), device_type=device_type)
        begin = next(moment for name, moment in found.phases if name == "backward")
        return found.at(begin - 1).by_kind["activation"]

    matrix, elements = 4 * 2 * 128 * 128, 2 * 128 * 16
    assert kept("cuda") < matrix < kept("cpu")
    assert kept("cuda") < 4 * elements * 8 + elements


def test_a_learned_mask_needs_no_attention_matrix_on_an_accelerator() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.zeros(1, 128, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(8, 128, 1, 48).transpose(1, 2).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(query, key, value, self.bias)

    found = [mmfsdp.rehearse(None, Biased(), torch.randn(8, 128, 16), device_type=kind) for kind in ("cuda", "cpu")]
    matrix = 4 * 8 * 128 * 128
    kept = [step.at(dict(step.phases)["backward"] - 1).by_kind["activation"] for step in found]
    assert kept[0] < matrix < kept[1]
    # The mask has a gradient, and AdamW its two moments; counts of steps lie in CPU memory.
    elements = sum(param.numel() for param in Biased().parameters())
    assert [step.static["optimizer state"] for step in found] == [8 * elements, 8 * elements + 4 * 3]


@pytest.mark.parametrize("setting", ["autocast", "bf16"])
def test_the_backward_of_attention_adds_up_in_float32_on_a_gpu(setting: str) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(self.norm(x)).view(2, 200, 1, 192).transpose(1, 2).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(query, key, value)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=setting == "autocast"):
            return model(x).sum()

    config = {"precision": "bf16"} if setting == "bf16" else None
    step = mmfsdp.rehearse(config, Attends(), torch.randn(2, 200, 64), loss=loss)
    sizes = [item.nbytes for item in step.allocations if item.begin >= dict(step.phases)["backward"]]
    assert 4 * 2 * 256 * (64 + 1) in sizes  # 200 rows, rounded up, of 64 columns, and one number for each row
    backward = dict(step.phases)["backward"]
    made = [item.nbytes for item in step.allocations if 0 < item.begin < backward]
    assert made.count(2 * 400 * 192) == 1  # the product is in bfloat16 in both, the norm in float32 under autocast
    assert made.count(4 * 400 * 64) == (setting == "autocast")


def test_nothing_that_is_given_is_changed() -> None:
    model, batch = Net(), {"x": torch.randn(4, 32)}
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    mmfsdp.rehearse(WRAP, model, batch, mesh=2, max_norm=1.0)
    assert not dist.is_initialized()
    assert type(model) is Net
    for name, param in model.named_parameters():
        assert id(param) == before[name][0]
        assert torch.equal(param, before[name][1])
        assert param.grad is None
    assert model(torch.randn(2, 32)).shape == (2, 5)


def test_a_model_on_meta_and_a_plan_give_the_same(step: Rehearsal) -> None:
    with torch.device("meta"):
        model, batch = Net(), torch.empty(64, 32)
    again = mmfsdp.rehearse(mmfsdp.plan(model, WRAP, 4), model, batch, device_type="cpu")
    assert again.plan == step.plan == mmfsdp.plan(Net(), WRAP, 4)
    assert again.peak == step.peak
    assert again.collectives == step.collectives


def test_the_last_rank_holds_padding() -> None:
    planned = mmfsdp.plan(Net(), WRAP, 4)
    assert planned.param_bytes(3) < planned.param_bytes(0) == rehearse(rank=3).static["parameter"]


def test_a_rehearsal_leaves_no_mesh_to_the_next_one() -> None:
    for rank in (0, 1):  # groups of equal meshes have other names on another rank
        found = rehearse({"engine": "replicate"}, mesh=2, rank=rank, max_norm=1.0)
        assert {item.ranks for item in found.collectives} - {1} == {2}  # torch 2.9 also asks the group of one rank
    with single_rank():
        model = mmfsdp.shard(Net(), {"engine": "replicate"})
        model(torch.randn(4, 32)).sum().backward()
        assert mmfsdp.clip_grad_norm_(model, 1.0) > 0


def test_hybrid_sharding_reduces_over_both_dimensions() -> None:
    hybrid = rehearse({"sharding": {"strategy": "HYBRID_SHARD"}}, mesh=(2, 4))
    assert {("reduce_scatter", 4, 1), ("all_reduce", 2, 4)} <= {*hybrid.sent()}


def test_it_prints_and_becomes_json(step: Rehearsal) -> None:
    text = str(step)
    assert "Peak of rank 0 of 4 ranks: " in text
    assert "blocks.{0..2}" in text
    assert "reduce_scatter" in text
    described = json.loads(json.dumps(step.describe()))
    assert described["peak"]["nbytes"] == step.peak.nbytes
    assert len(described["collectives"]) == len(step.collectives)


class Refuses(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([x, x], 1))


class Mixes(torch.optim.SGD):
    """Adds plain tensors to gradients, which torch refuses if they are sharded."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(torch.zeros(param.shape))


def _no_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).detach()


def errors() -> Iterator[Any]:
    x = torch.randn(4, 32)
    yield Refuses(), x, {}, RehearsalError, r"needs the values of a tensor at .*test_rehearsal.py:\d+ \(.*item\(\)"
    yield Broken(), x, {}, RehearsalError, r"failed in forward at .*test_rehearsal.py.*fqn='head'"
    yield (
        Net(),
        {"y": x},
        {},
        RehearsalError,
        r"Net does not take this batch \(missing .*'x'\). Its forward is forward\(x: .*as forward\(y=tensor",
    )
    yield (
        Net(),
        x,
        {"optimizer": "adamv"},
        ConfigError,
        "'adamv' is not an optimizer of torch.optim. Did you mean 'adam' or ",
    )
    yield Net(), x, {"accumulate": 0}, ConfigError, "at least 1, got 0"
    yield Net(), x, {"rank": 4}, MeshError, "Rank 4 is not in 4 ranks"
    yield Net(), x, {"optimizer": lambda p: Mixes(p, lr=1)}, RehearsalError, r"cannot run .*ignored_parameters=\[\"\*\*"
    yield Net(), x, {"optimizer": torch.optim.LBFGS}, RehearsalError, "without a closure. .* such as SGD with momentum"
    yield Net(), x, {"loss": _no_loss}, RehearsalError, "failed in backward"


@pytest.mark.parametrize(("model", "batch", "settings", "kind", "message"), [*errors()])
def test_refusals(model: nn.Module, batch: Any, settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        mmfsdp.rehearse(None, model, batch, mesh=4, **settings)
    assert not dist.is_initialized()


class Mixed(nn.Module):
    """Computes with a parameter and a buffer, which keeps its dtype."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.compute, self.norm = nn.Linear(32, 32), compute, nn.LayerNorm(32)
        self.conv = nn.Conv1d(4, 4, 3)
        self.register_buffer("mask", torch.zeros(4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return self.compute(y, self.mask, self)


MIXED = {
    "mm": lambda y, mask, _: (y + mask) @ y.T,
    "linear": lambda y, mask, model: model.inner(y + mask),
    "bias": lambda y, mask, _: nn.functional.linear(y, y[:, :32], mask[0, :4]),
    "mv": lambda y, mask, _: (y + mask) @ y[0],
    "convolution": lambda y, mask, model: model.conv(y + mask),
    "norm": lambda y, mask, model: model.norm(y + mask),
    "index_add": lambda y, mask, _: (y * 1).index_add(0, torch.tensor([0]), mask[:1]),
    "index_copy": lambda y, mask, _: (y * 1).index_copy(0, torch.tensor([0]), mask[:1]),
    "index_put": lambda y, mask, _: (y * 1).index_put((torch.tensor([0]),), mask[:1]),
}


@pytest.mark.sample("norm", "linear", "index_add")
@pytest.mark.parametrize("compute", MIXED.values(), ids=MIXED)
def test_a_step_that_fails_because_of_a_buffer_says_how_to_cast_it(compute: Any) -> None:
    """As in training, and it runs where training does."""
    x, told = (
        torch.randn(4, 32),
        "'mask' keep their dtype. Set precision.buffer_dtype to \"bfloat16\"; so this step runs",
    )
    cast = {"precision": {"preset": "bf16", "buffer_dtype": "bfloat16"}}
    with pytest.raises(RehearsalError, match=told):
        mmfsdp.rehearse({"precision": "bf16"}, Mixed(compute), x)
    assert mmfsdp.rehearse(cast, Mixed(compute), x).peak.nbytes > 0
    with single_rank():
        with pytest.raises(RuntimeError, match=r"dtype|scalar type|bias type"):
            mmfsdp.shard(Mixed(compute), {"precision": "bf16"})(x)
        mmfsdp.shard(Mixed(compute), cast)(x).float().mean().backward()


def test_a_step_that_fails_in_spite_of_its_buffers_says_nothing_of_them() -> None:
    """A buffer of another dtype is no reason to cast it if that does not help."""
    x = torch.randn(4, 32)
    bias = Mixed(lambda y, _, model: nn.functional.linear(y, y[:, :32], model.inner.bias.float()[:4]))
    with pytest.raises(RehearsalError, match="dtype") as caught:
        mmfsdp.rehearse({"precision": "bf16"}, bias, x)
    assert "buffer" not in str(caught.value)
    is_checked = embedding_checks_indices()
    with pytest.raises(RehearsalError, match="'indices'" if is_checked else "broadcast") as caught:
        mmfsdp.rehearse(
            {"precision": "bf16"}, nn.Sequential(nn.Embedding(8, 32), Mixed(MIXED["mm"])), torch.zeros(2, 8)
        )
    assert ("give tokens as torch.int64; on a command line: --batch 2x8:int64" in str(caught.value)) == is_checked
    assert not any(words in str(caught.value) for words in ("Training also fails", "buffer"))


def embedding_checks_indices() -> bool:
    """Return whether torch refuses floating indices of tensors without values; 2.9 does not, and fails in the sum."""
    try:
        nn.functional.embedding(torch.zeros(2, device="meta"), torch.zeros(8, 32, device="meta"))
    except RuntimeError:
        return True
    return False


def test_refuses_a_compiled_model() -> None:
    with pytest.raises(PlanError, match=r"compiled already: torch.compile\(\) returned it .*compile afterwards"):
        mmfsdp.rehearse(None, torch.compile(Net(), backend="eager"), torch.randn(4, 32))  # type: ignore[arg-type]


def allocation(nbytes: int, begin: int, end: int | None, module: str = "", kind: str = "activation") -> Allocation:
    return Allocation(nbytes, kind, module, begin, end)


def test_accounting() -> None:
    found = [allocation(5, 0, None, kind="parameter"), allocation(3, 1, 4), allocation(4, 2, 3), allocation(6, 4, 6)]
    assert highest(found) == (12, 2)
    assert series(found, 6, 100) == [
        (0, {"parameter": 5}),
        (1, {"parameter": 5, "activation": 3}),
        (2, {"parameter": 5, "activation": 7}),
        (3, {"parameter": 5, "activation": 3}),
        (4, {"parameter": 5, "activation": 6}),
        (6, {"parameter": 5}),
    ]
    assert [sum(counts.values()) for _, counts in series(found, 6, 2)] == [12, 11]


def test_equal_layers_share_a_row() -> None:
    held = [allocation(8, 0, None, f"layers.{place}.up") for place in range(3)] + [allocation(30, 0, None, "head")]
    assert shares(held) == [("head", "activation", 30, 1), ("layers.{0..2}.up", "activation", 24, 3)]


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("sizes", "reserved", "expandable"),
    [
        ([1, 512], 2 * MIB, 2 * MIB),  # small blocks share a segment
        ([MIB, MIB, 1], 4 * MIB, 4 * MIB),
        ([MIB + 1], 20 * MIB, 20 * MIB),  # above 1 MiB the pool is another
        ([9 * MIB, 9 * MIB], 20 * MIB, 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB, 40 * MIB),  # a segment grows, or is another one
        ([19 * MIB, 2 * MIB], 40 * MIB, 40 * MIB),  # a large rest of 1 MiB is not split off
        ([10 * MIB], 10 * MIB, 20 * MIB),
        ([31 * MIB], 32 * MIB, 40 * MIB),
    ],
)
def test_segments_of_the_caching_allocator(sizes: list[int], reserved: int, expandable: int) -> None:
    for wanted, grows in ((reserved, False), (expandable, True)):
        allocator = CachingAllocator(expandable=grows)
        for size in sizes:
            allocator.allocate(size)
        assert allocator.reserved == wanted


@pytest.mark.parametrize("expandable", [False, True])
def test_the_caching_allocator_joins_what_is_freed(expandable: bool) -> None:
    allocator, random, live = CachingAllocator(expandable=expandable), Random(1), list[Any]()
    for _ in range(3_000):
        if random.random() < 0.5 or not live:
            live.append(allocator.allocate(random.choice([100, 700_000, 3 * MIB, 12 * MIB, 64 * MIB + 5])))
        else:
            allocator.release(live.pop(random.randrange(len(live))))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    for block in live:
        allocator.release(block)
    before = allocator.reserved
    assert allocator.allocated == 0
    # Everything is one free piece again: the largest block fits into what is reserved.
    allocator.allocate(64 * MIB)
    assert allocator.reserved == before


def test_memory_of_another_stream_cannot_be_used() -> None:
    first, second = allocation(30 * MIB, 1, 2, kind="gathered"), allocation(30 * MIB, 3, 4)
    assert replayed([first, second]) == Replayed(30 * MIB, 30 * MIB, 0, 0)
    assert replayed([dataclasses.replace(first, stream="gathers"), second]) == Replayed(60 * MIB, 30 * MIB, 0, 0)


def test_a_very_large_request_may_not_find_its_segment_again() -> None:
    def most(items: list[Allocation], **options: Any) -> int:
        return taken_ranges([allocation(20 * GIB, 0, None), *items], [], workspaces=((), ()), **options)[0][1]

    once = [allocation(4 * GIB, 1, 2, kind="reduce buffer")]
    twice = [*once, allocation(3 * GIB, 3, 4)]
    assert most(once) == round(24 * GIB * (1 + UNCERTAIN)) + 4 * GIB
    assert most(twice) == round(24 * GIB * (1 + UNCERTAIN))  # another one keeps the segment together
    assert most([allocation(4 * GIB, 1, 2)]) == round(24 * GIB * (1 + UNCERTAIN))  # not of gradients
    small = [allocation(2 * GIB, 1, 2, kind="reduce buffer")]
    assert most(small) == round(22 * GIB * (1 + UNCERTAIN))  # less than an eighth
    assert most(once, expandable=True) < 26 * GIB
    assert most(once, limits=[26 * GIB]) == 26 * GIB


def test_buffers_of_messages_are_on_streams_of_their_own() -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), torch.empty(2, 64)
    whole, shard = 64 * 64 * 4, 64 * 64 * 4 // 4
    config = {"wrap": {"kind": "module_class", "classes": "Linear"}}
    step = mmfsdp.rehearse(config, model, batch, mesh=4)
    by_stream = {
        stream: {(item.kind, item.nbytes) for item in step.allocations if item.stream == stream and item.begin}
        for stream in ("gathers", "reduces")
    }
    # As a GPU's allocator records them: what is gathered into, and the shards of gradients; not the parameters that are
    # copied out, nor what is reduced.
    assert by_stream == {"gathers": {("gathered", whole)}, "reduces": {("gradient", shard)}}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("mesh", [1, 4])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_streams_of_fsdp1_are_those_that_a_gpu_shows(mesh: int, precision: str) -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), torch.empty(2, 64)
    config = {"engine": "fsdp1", "precision": precision, "wrap": {"kind": "module_class", "classes": "Linear"}}
    step = mmfsdp.rehearse(config, model, batch, mesh=mesh)
    whole = 64 * 64 * 4
    half, shard = whole // 2, whole // mesh
    joined = half if precision == "bf16" else whole  # the gradient of a flat parameter
    expected: dict[str, set[tuple[str, int]]] = {"gathers": {("activation gradient", joined)}}
    if precision == "bf16":
        expected["casts"] = {("gathered", half // mesh)}
        expected["reduces"] = {("gradient", shard)}
        if mesh > 1:
            expected["reduces"] |= {("activation gradient", whole)}
    elif mesh == 1:
        expected = {"gathers": {("gradient", whole)}}  # which is the one that autograd has joined
    else:
        expected["reduces"] = {("gradient", shard)}
    if mesh > 1:
        expected["gathers"] |= {("gathered", joined)}
    found: dict[str, set[tuple[str, int]]] = {}
    for item in step.allocations:
        if item.stream:
            found.setdefault(item.stream, set()).add((item.kind, item.nbytes))
    assert found == expected
    parts = [item for item in step.allocations if item.waits and not item.stream]  # what autograd has joined
    assert {(item.kind, item.nbytes) for item in parts} == {("activation gradient", joined)}


def test_units_of_fsdp1_wait_until_the_second_gather_after_them() -> None:
    units = [allocation(30 * MIB, moment, moment + 1, kind="gathered") for moment in (1, 3, 5, 7)]
    found = [dataclasses.replace(unit, waits=True) for unit in units]
    late = released_late([*found, allocation(1, 2, 3)], [("forward", 1), ("optimizer", 9)])
    assert [item.end for item in late] == [5, 7, 9, 9, 3]


def test_three_units_of_fsdp1_wait_when_backward_begins() -> None:
    # As a GPU's allocator shows: prefetching in backward asks before it frees, which leaves one more in the queue.
    model, batch = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.empty(2, 512)
    config = {"wrap": {"kind": "module_class", "classes": "Linear"}}
    counts = {}
    for engine in ("fsdp1", "fsdp2"):
        step = mmfsdp.rehearse({**config, "engine": engine}, model, batch, mesh=2)
        assert (step.active()[1] > step.allocated()[1]) == (engine == "fsdp1")
        assert step.active()[0] == step.allocated()[0]
        begin = dict(step.phases)["backward"]
        soon, late = (
            [item.module for item in held_at(items, begin) if item.kind == "gathered"]
            for items in (step.allocations, released_late(step.allocations, step.phases))
        )
        counts[engine] = len(late) - len(soon)
    assert counts == {"fsdp1": 3, "fsdp2": 0}


def test_state_that_the_first_step_makes_lies_in_what_activations_leave() -> None:
    found = [
        allocation(60 * MIB, 0, None, kind="optimizer state"),
        allocation(100 * MIB, 1, 2),
        allocation(1, 3, 4, kind="optimizer temporary"),
    ]
    # Made before, it has a segment of its own. Made after the first forward, it is cut from that of the activation, for
    # which the second step then needs another one.
    assert replayed(found).reserved == (60 + 100 + 2) * MIB
    assert replayed(found, state_from=3).reserved == (100 + 100 + 2) * MIB
    assert replayed(found[1:], workspaces=[30 * MIB]).reserved == (100 + 30 + 2) * MIB


def test_what_a_gpu_needs_besides_the_allocator(step: Rehearsal) -> None:
    alone = CONTEXT[1] + NCCL_LIBRARY[0] + alone_bytes()[1]  # a loop on one rank may have a communicator
    assert beside_allocator([]) == (CONTEXT[0], alone)
    library = [CONTEXT[place] + NCCL_LIBRARY[place] for place in (0, 1)]
    each = communicator_bytes()
    assert each == (16 << 20, (32 * 24 + 256) << 20)
    beside = [library[place] + each[place] for place in (0, 1)]  # all messages go through one group
    assert [a - b for a, b in zip(step.device_bytes(), step.reserved(), strict=True)] == beside
    hybrid = rehearse({"sharding": {"strategy": "HYBRID_SHARD"}}, mesh=(2, 4))
    assert hybrid.device_bytes()[1] - hybrid.reserved()[1] == library[1] + 2 * each[1]
    assert "\nWith the CUDA context and NCCL, of the GPU: " in str(rehearse(device_type="cuda"))


def test_settings_of_nccl_change_what_a_communicator_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "16")
    assert communicator_bytes()[0] == 100 << 20  # 101 MiB were measured
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    monkeypatch.setenv("NCCL_BUFFSIZE", str(2 << 20))
    assert communicator_bytes() == (52 << 20, 8 * (2 * 10 + 8) << 20)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert communicator_bytes()[1] == 8 * 2 * 10 << 20
    monkeypatch.setenv("NCCL_BUFFSIZE", "2M")  # which NCCL does not read either
    assert communicator_bytes()[1] == 8 * 2 * 12 << 20


@pytest.mark.parametrize(
    ("name", "alone", "several"),  # MiB that were measured or published, and at most
    [
        ("a100", (0, 388), (688, 768)),
        ("h100", (388, 388), (101, 1024)),
        ("b300", (512, 772), (0, 2048)),
        ("rtx5090", (0, 772), (0, 1536)),
        ("l40s", (0, 388), (0, 768)),
        ("mi300x", (0, 388), (0, 1024)),
    ],
)
def test_buffers_of_nccl_by_architecture(name: str, alone: tuple[int, int], several: tuple[int, int]) -> None:
    for (known, most), found in ((alone, alone_bytes), (several, communicator_bytes)):
        low, high = found(device_of(name))
        assert low <= known << 20 <= high or not known
        assert high == most << 20


def test_what_is_reserved_is_more_than_the_peak(step: Rehearsal) -> None:
    for expandable in (False, True):
        low, high = step.reserved(expandable=expandable)
        assert step.peak.nbytes <= low <= high


def test_averages_must_be_updatable() -> None:
    with pytest.raises(ConfigError, match="ema returned Linear, which has no update_parameters"):
        mmfsdp.rehearse(None, nn.Linear(2, 2), torch.empty(1, 2), ema=lambda model: nn.Linear(1, 1))


def test_offloaded_shards_are_in_cpu_memory() -> None:
    plain, step = (rehearse(config, device_type="cuda", max_norm=1.0) for config in ({"precision": "bf16"}, OFFLOADED))
    expected = estimate_memory(step.plan, "adamw")
    assert dict(step.static) == {kind: plain.static[kind] for kind in ("buffer", "input")}
    assert sum(item.nbytes for item in step.on_cpu if item.begin == 0) == expected.on_cpu - expected.gradients
    # The optimizer works there, with temporaries of one tensor after the other.
    assert expected.on_cpu < step.cpu_bytes < expected.on_cpu + 3 * 4 * 32 * 128
    # The rest of the step is as it was: the device holds less by the shards, and by the gradients that were reduced.
    most = plain.peak.nbytes - expected.parameters - plain.static["optimizer state"]
    assert most - expected.gradients <= step.peak.nbytes <= most
    for kind in ("activation", "activation gradient", "reduce buffer"):
        sizes = [highest(item for item in each.allocations if item.kind == kind)[0] for each in (plain, step)]
        assert sizes[0] == sizes[1] > 0
    assert [item.nbytes for item in step.collectives] == [item.nbytes for item in plain.collectives]
    copies = [item for item in step.operators if item.name in COPIES]
    units = {unit.fqn: step.plan.unit_param_bytes(unit, 0) for unit in step.plan.units}
    assert [item.nbytes for item in copies] == [units[str(item.unit)] for item in copies]
    sent = Counter(item.name for item in step.collectives if item.unit is not None)
    assert Counter(item.name for item in copies) == {
        TO_DEVICE: sent["all_gather"],
        TO_CPU: sent["reduce_scatter"],
    }
    assert step.time().spent["host"] > 0 == plain.time().spent["host"]
    assert "In CPU memory, because the plan offloads: " in step.table()
    assert step.describe()["cpu_bytes"] == step.cpu_bytes


@pytest.mark.parametrize(("engine", "mesh"), [("auto", 1), ("replicate", 2)])
def test_offloaded_parameters_that_are_whole_are_copied_one_by_one(engine: str, mesh: int) -> None:
    step = rehearse({**OFFLOADED, "engine": engine}, mesh=mesh, device_type="cuda")
    assert set(step.static) == {"buffer", "input"}
    assert step.cpu_bytes >= 4 * step.plan.param_bytes()
    copied: Counter[tuple[str, str | None, str]] = Counter()
    for item in step.operators:
        if item.name in COPIES:
            copied[item.name, item.unit, item.phase] += item.nbytes
    expected = {}
    for unit in step.plan.units:
        phases = ["forward", *(["backward"] if unit.reshard_after_forward is True and not unit.is_root else [])]
        size = expected[TO_CPU, unit.fqn, "backward"] = step.plan.unit_param_bytes(unit)
        expected |= {(TO_DEVICE, unit.fqn, phase): size for phase in phases}
    assert copied == expected
