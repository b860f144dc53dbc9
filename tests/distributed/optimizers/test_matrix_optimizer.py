"""Muon on shards is Muon in one process: bit by bit from equal gradients, and in training."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import mmfsdp
from mmfsdp.errors import OptimizerStepError, RankMismatchError, StateDictError
from mmfsdp.optimizers import join_states, split_state
from mmfsdp.optimizers.functions import MUON
from mmfsdp.optimizers.matrix_optimizer import MatrixOptimizer
from mmfsdp.optimizers.shards import local_of
from mmfsdp.runtime.dtensors import local_part
from mmfsdp.testing import run_ranks

MUON_SETTINGS: dict[str, Any] = {
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
}


class Net(nn.Module):
    """Matrices that are wide, tall, square, and of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(16, 24), (24, 7), (7, 7), (7, 2), (2, 40), (40, 16)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def muon(model: nn.Module, bucket_bytes: int = 2**20, **settings: Any) -> MatrixOptimizer:
    defaults = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, **MUON_SETTINGS, **settings}
    return mmfsdp.matrix_optimizer(model, MUON, lr=0.02, bucket_bytes=bucket_bytes, **defaults)


def set_gradients(model: nn.Module, seed: int) -> None:
    """Give each parameter the same gradient on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor):
            part = local_part(grad, param).clone()
            param.grad = DTensor.from_local(
                part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            param.grad = grad


def stepped(rank: int, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step three times with given gradients."""
    model = mmfsdp.shard(Net(), config)
    optimizer = muon(model, **settings)
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.step()
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


def alone(settings: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, **(settings or {}))
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.step()
    return model.state_dict()


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "three": (3, {}),
    "four": (4, {}),
    "hybrid": (4, {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}),
    "replicated": (2, {"sharding": "NO_SHARD"}),
    "whole": (2, {"sharding": {"ignored_parameters": ["**"]}}),
    "some whole": (3, {"sharding": {"ignored_parameters": ["layers.1.*"]}}),
    "offloaded": (2, {"cpu_offload": True}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_equals_one_process_bit_by_bit(case: str) -> None:
    ranks, config = CONFIGS[case]
    wanted = alone()
    for found in run_ranks(stepped, ranks, config, {}):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"ns_steps": 3, "eps": 1e-3},
    ],
)
def test_every_setting(settings: dict[str, Any]) -> None:
    wanted = alone(settings)
    for found in run_ranks(stepped, 2, {}, {**settings, "bucket_bytes": 500}):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


class Deep(nn.Module):
    """An embedding, hidden layers with norms and biases, a convolution, fused q, k and v, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(12), nn.MultiheadAttention(12, 2, bias=False, batch_first=True)
        self.conv, self.up, self.down = nn.Conv1d(12, 12, 3, padding=1), nn.Linear(12, 20), nn.Linear(20, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 12) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0] + self.conv(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.up(x).tanh()) + torch.einsum("btc,ecd->btd", y, self.experts)


OPTIMIZER: dict[str, Any] = {"muon": "auto", "lr": 0.02, "weight_decay": 0.01, "adamw": {"lr": 1e-2}}


class Reference:
    """Muon and AdamW of torch in one process, each matrix of a parameter as a parameter of its own."""

    def __init__(self, model: Deep) -> None:
        self.model, muon, adamw = model, [], []
        self.parts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for name, param in model.named_parameters():
            if "embed" in name or "head" in name or param.dim() < 2:
                adamw.append(param)
                continue
            count = 3 if "in_proj" in name or "experts" in name else 1
            views = [part.detach().flatten(1) for part in self._divided(param.data, count)]
            self.parts.append((param, [nn.Parameter(view) for view in views]))
            muon += self.parts[-1][1]
        self.optimizers = [torch.optim.Muon(muon, lr=0.02, weight_decay=0.01), torch.optim.AdamW(adamw, lr=1e-2)]

    @staticmethod
    def _divided(value: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [*value] if value.dim() == 3 and count == 3 else [*value.chunk(count)]

    def step(self) -> None:
        for param, own in self.parts:
            assert param.grad is not None
            for part, grad in zip(own, self._divided(param.grad, len(own)), strict=True):
                part.grad = grad.flatten(1).clone()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (24, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(1, 1))


def train(rank: int, config: dict[str, Any], first: int, last: int, resume: str, save: str) -> dict[str, torch.Tensor]:
    """Train with accumulation and clipping."""
    model = mmfsdp.shard(Deep(), {"wrap": "Block", "optimizer": OPTIMIZER, **config})
    optimizer = mmfsdp.build_optimizer(model)
    if resume:
        mmfsdp.load_checkpoint(resume, model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for seed in range(first, last):
        mine = batch(seed).chunk(dist.get_world_size())[rank]
        for number, part in enumerate(mine.chunk(2)):
            with mmfsdp.no_sync(model) if number == 0 else nullcontext():
                (loss_of(model, part) / 2).backward()
        mmfsdp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if save:
        for kind in ("sharded", "local", "full"):
            mmfsdp.save_checkpoint(f"{save}/{kind}{'.pth' if kind == 'full' else ''}", model, optimizer, kind=kind)
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


def trained_alone(steps: int) -> dict[str, torch.Tensor]:
    model = Deep()
    reference = Reference(model)
    for seed in range(steps):
        loss_of(model, batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
    return model.state_dict()


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(((found[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted)


@pytest.mark.sample("one", "offloaded", "two", "some whole")
@pytest.mark.parametrize("case", ["one", "two", "three", "four", "hybrid", "replicated", "some whole", "offloaded"])
def test_trains_as_one_process(case: str) -> None:
    ranks, config = CONFIGS[case]
    if case == "some whole":
        config = {"sharding": {"ignored_parameters": ["blocks.1.up.*"]}}
    wanted = trained_alone(3)
    for found in run_ranks(train, ranks, config, 0, 3, "", ""):
        # Newton-Schulz computes in bfloat16, which makes a last bit of a gradient one of eight bits.
        assert difference(found, wanted) < 5e-3


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with checkpoints of two steps, and the weights after four."""
    folder = tmp_path_factory.mktemp("half_way")
    run_ranks(train, 2, {}, 0, 2, "", str(folder))
    return folder, run_ranks(train, 2, {}, 0, 4, "", "")[0]


@pytest.mark.sample("local")
@pytest.mark.parametrize("kind", ["sharded", "local", "full.pth"])
def test_resumes_on_other_ranks(kind: str, half_way: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, wanted = half_way
    for found in run_ranks(train, 2, {}, 2, 4, f"{folder}/{kind}", ""):
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    for found in run_ranks(train, 3, {}, 2, 4, f"{folder}/{kind}", ""):
        assert difference(found, wanted) < 5e-3


def messages_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the number of each collective in the second step: the first also compares the ranks' arguments."""
    for seed in range(2):
        set_gradients(model, seed)
        with CommDebugMode() as found:
            optimizer.step()
    return {str(name): count for name, count in found.get_comm_counts().items()}


def counted_and_planned(rank: int) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return messages with small buckets, those with two groups under Muon, and what the plan of these shows."""
    net = mmfsdp.shard(Net())
    layer, config = nn.TransformerEncoderLayer(32, 4, 64), {"optimizer": {"muon": "auto", "lr": 0.02}}
    rows = [row.split() for row in str(mmfsdp.plan(layer, config, 2)).splitlines()]
    planned = [row[-4] for row in rows if row[:1] == ["muon"]]
    model = mmfsdp.shard(layer, config)
    by_size = messages_of_a_step(net, muon(net, bucket_bytes=1800))
    return by_size, messages_of_a_step(model, mmfsdp.build_optimizer(model)), planned


def test_two_messages_per_bucket() -> None:
    for by_size, of_groups, planned in run_ranks(counted_and_planned, 2):
        # 2 bytes for each of 384, 168, 49, 14, 80 and 640 elements: in buckets of at most 600 bytes on 2 ranks
        assert by_size == {"c10d.alltoall_base_": 2 * 4}
        assert of_groups == {"c10d.alltoall_base_": 2}
        assert planned == ["2", "shared"]


def broken(rank: int, how: str, config: dict[str, Any]) -> tuple[str, str, torch.Tensor]:
    """Step with a matrix that cannot be updated; return the error, its cause, and this rank's part of the matrix."""
    model = mmfsdp.shard(Net(), config)

    def update(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
        if matrix.shape != (7, 24):
            return matrix
        found = {"shape": matrix[:2], "dtype": matrix.bfloat16(), "none": None, "nan": matrix * torch.nan}
        if how == "raises":
            raise ValueError("no")
        return found.get(how, matrix)  # type: ignore[return-value]

    optimizer = mmfsdp.matrix_optimizer(model, update, weight_decay=0.1 if how == "gradient" else 0.0)
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    set_gradients(model, 0)
    if how == "gradient" and rank == 0:
        model.layers[1].weight.grad = None
    try:
        optimizer.step()
    except OptimizerStepError as error:
        after = mmfsdp.model_state_dict(model, rank0_only=False)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed - {"layers.1.weight"} == {name for name in before if name != "layers.1.weight"}
        assert how == "gradient" or "layers.1.weight" not in changed
        return str(error), repr(error.__cause__), local_of(model.layers[1].weight.detach()).clone()
    return "", "", torch.empty(0)


@pytest.mark.parametrize(
    ("how", "message", "cause"),
    [
        ("nan", "is not finite.", ""),
        ("raises", "could not be computed", "ValueError('no')"),
        ("shape", "could not be computed", "returned torch.float32 of shape (2, 24) on cpu."),
        ("dtype", "could not be computed", "returned torch.bfloat16 of shape (7, 24) on cpu."),
        ("none", "could not be computed", "For 'layers.1.weight' it returned None."),
        ("gradient", "needs a gradient on all ranks, but only some have one.", ""),
    ],
)
@pytest.mark.parametrize("case", ["two", "hybrid", "replicated", "whole"])
def test_all_ranks_raise_together(how: str, message: str, cause: str, case: str) -> None:
    found = run_ranks(broken, CONFIGS[case][0], how, CONFIGS[case][1])
    for text, *_ in found:
        assert f"The update of 'layers.1.weight' {message}" in text
    assert any(cause in own for _, own, _ in found)
    parts = [part for *_, part in found]
    for one, other in {"two": [], "hybrid": [(0, 2), (1, 3)]}.get(case, [(0, 1)]):
        assert torch.equal(parts[one], parts[other])  # replicas stay equal


def unlike(rank: int) -> str:
    model = mmfsdp.shard(Net())
    params = [*model.parameters()][rank:]
    optimizer = mmfsdp.matrix_optimizer(model, lambda matrix, *_: matrix, params)
    set_gradients(model, 0)
    try:
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_with_other_parameters() -> None:
    assert all("with params=[('layers.0.weight'" in text for text in run_ranks(unlike, 2))


def whitened(rank: int) -> dict[str, torch.Tensor]:
    """A function with a state of its own per matrix: Shampoo's left preconditioner."""
    model = mmfsdp.shard(Net())
    optimizer = mmfsdp.matrix_optimizer(model, shampoo, lr=0.1, momentum=0.0, nesterov=False, damping=1e-3)
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.step()
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


def shampoo(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
    gram = matrix @ matrix.T
    state["left"] = state["left"] + gram if "left" in state else gram
    values, vectors = torch.linalg.eigh(state["left"])
    return vectors @ ((values.clamp(min=0) + settings["damping"]) ** -0.25).diag() @ vectors.T @ matrix


def test_any_function_of_a_matrix() -> None:
    [wanted] = run_ranks(whitened, 1)
    for found in run_ranks(whitened, 3):
        assert difference(found, wanted) < 1e-5


def soap(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
    """Adam in the eigenbasis of Shampoo's preconditioner: tensors of several shapes, a count, and a list."""
    gram = matrix @ matrix.T
    state["left"] = state["left"].lerp(gram, 0.1) if "left" in state else gram
    state["step"] = state.get("step", 0) + 1
    basis = torch.linalg.qr(state["left"] + torch.eye(len(gram)))[0]
    turned = basis.T @ matrix
    squares = state.get("squares", [torch.zeros_like(turned)])
    state["squares"] = [squares[0].lerp(turned.square(), 0.1)]
    corrected = state["squares"][0] / (1 - 0.9 ** state["step"])
    return basis @ (turned / (corrected.sqrt() + 1e-3))


def dion(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
    """A power iteration of low rank that starts from the right factor of the step before, which is kept in float64."""
    rank = min(2, *matrix.shape)
    right = state.get("right", torch.eye(matrix.shape[1], rank, dtype=torch.float64))
    left = torch.linalg.qr(matrix.double() @ right)[0]
    state["right"] = (matrix.double().T @ left).clone()
    state["right"] /= state["right"].norm(dim=0, keepdim=True).clamp(min=1e-9)
    return (left @ state["right"].T).to(matrix.dtype)


FUNCTIONS = {"shampoo": shampoo, "soap": soap, "dion": dion}


def continued(rank: int, folder: str, first: int, last: int, kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train with each function from a step to another; a checkpoint lies in between."""
    found = {}
    for name, function in FUNCTIONS.items():
        model = mmfsdp.shard(Net())
        optimizer = mmfsdp.matrix_optimizer(model, function, lr=0.02, damping=1e-3)
        path = f"{folder}/{name}.{kind}{'.pth' if kind == 'full' else ''}"
        if first:
            mmfsdp.load_checkpoint(path, model, optimizer)
        set_and_step(model, [optimizer], range(first, last))
        if not first and last < 4:
            mmfsdp.save_checkpoint(path, model, optimizer, kind=kind)
            wanted = {"shampoo": ["left"], "soap": ["left", "squares", "step"], "dion": ["right"]}[name]
            state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"]
            assert [sorted(state[place]["matrices"]["0"]) for place in range(6)] == [wanted] * 6
        found[name] = mmfsdp.model_state_dict(model, rank0_only=False)
    return found


@pytest.fixture(scope="module")
def never_stopped() -> dict[str, dict[str, torch.Tensor]]:
    return run_ranks(continued, 1, "", 0, 4, "")[0]


@pytest.mark.sample("full")
@pytest.mark.parametrize("kind", ["sharded", "local", "full"])
def test_the_state_of_a_function_resumes_on_any_ranks(kind: str, never_stopped: Any, tmp_path: Any) -> None:
    run_ranks(continued, 2, str(tmp_path), 0, 2, kind)
    wanted = never_stopped
    for ranks in (3, 1) if kind == "sharded" else (3,):
        for found in run_ranks(continued, ranks, str(tmp_path), 2, 4, kind):
            for name in FUNCTIONS:
                assert difference(found[name], wanted[name]) < 1e-5, name


def unsavable(rank: int) -> str:
    model = mmfsdp.shard(Net())

    def update(matrix: torch.Tensor, state: dict[str, Any], settings: Any) -> torch.Tensor:
        if matrix.shape == (7, 24):
            state["made by"] = object()
        return matrix

    optimizer = mmfsdp.matrix_optimizer(model, update)
    set_and_step(model, [optimizer], range(1))
    try:
        mmfsdp.optim_state_dict(model, optimizer)
    except StateDictError as error:
        return str(error)
    return ""


def test_a_state_that_no_checkpoint_holds_is_named() -> None:
    for text in run_ranks(unsavable, 2):
        assert "The matrix function keeps 'made by' of 'layers.1.weight' as a builtins.object" in text


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def set_and_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], seeds: range) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        for optimizer in optimizers:
            optimizer.step()


def handed_over(rank: int) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Step twice; return weights and state, and the weights after two more steps."""
    model = mmfsdp.shard(plain(), {"optimizer": {"lr": 0.02}})
    optimizer = mmfsdp.build_optimizer(model)
    set_and_step(model, [optimizer], range(2))
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    set_and_step(model, [optimizer], range(2, 4))
    return weights, state, mmfsdp.model_state_dict(model, rank0_only=False)


def taken_over(rank: int, weights: Any, muon: Any, adamw: Any) -> dict[str, torch.Tensor]:
    model = mmfsdp.shard(plain(), {"optimizer": {"lr": 0.02}})
    optimizer = mmfsdp.build_optimizer(model)
    mmfsdp.load_model_state_dict(model, weights)
    mmfsdp.load_optim_state_dict(model, optimizer, join_states(muon, adamw, optimizer.state_dict()))
    set_and_step(model, [optimizer], range(2, 4))
    found: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return found


def test_torch_resumes_from_it_and_the_reverse() -> None:
    weights, state, wanted = run_ranks(handed_over, 2)[0]
    states = split_state(state)
    model = plain()
    model.load_state_dict(weights)
    of_muon = ["1.weight", "2.weight"]
    params = dict(model.named_parameters())
    muon = torch.optim.Muon([params[name] for name in of_muon], lr=0.02)
    adamw = torch.optim.AdamW([param for name, param in params.items() if name not in of_muon])
    muon.load_state_dict(states["muon"])
    adamw.load_state_dict(states["adamw"])
    before = copy.deepcopy((muon.state_dict(), adamw.state_dict()))
    set_and_step(model, [muon, adamw], range(2, 4))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)
    for found in run_ranks(taken_over, 3, weights, *before):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


OTHER_GROUPINGS: dict[str, tuple[dict[str, Any], str]] = {
    "moved": ({"exclude": ["1.weight"]}, "The state has optimizer='adamw' for '1.weight', but the optimizer has"),
    "all moved": ({"muon": None}, "The state has optimizer='adamw' for '1.weight', '2.weight'"),
    "swapped": (
        {"exclude": ["1.weight"], "muon": ["2.weight", "3.weight", "4.weight"]},
        "for '1.weight', but the optimizer has",
    ),
    "fused": ({"fused": {"1.weight": 3}}, "The state has parts=3 for '1.weight', but the optimizer has parts=1."),
    "stacked": ({"stacked": ["4.weight"]}, "The state has is_stack=True for '4.weight', but the optimizer has is_st"),
    "missing": ({"frozen": "2.weight"}, "The optimizer updates '2.weight', which the state does not have."),
    "extra": ({"ours": "2.weight"}, "The state has '2.weight', which the optimizer does not update."),
}


def grouped(frozen: str | None, rules: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that ends with a convolution, and its optimizer."""
    model = nn.Sequential(*plain(), nn.Linear(6, 6, bias=False), nn.Conv1d(6, 6, 3, bias=False))
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    model = mmfsdp.shard(model, {"optimizer": {"lr": 0.02, "exclude": ["3.weight"], **rules}})
    return model, mmfsdp.build_optimizer(model)


def of_other_groupings(rank: int, folder: str) -> dict[str, str]:
    """Return the error of loading the state of each other grouping, saved in two ways."""
    found = {}
    for case, (settings, _) in OTHER_GROUPINGS.items():
        rules = {key: value for key, value in settings.items() if key not in ("frozen", "ours")}
        theirs, saved = grouped(settings.get("frozen"), rules)
        set_and_step(theirs, [saved], range(1))
        mmfsdp.save_checkpoint(f"{folder}/{case}", theirs, saved)
        model, optimizer = grouped(settings.get("ours"), {})
        set_and_step(model, [optimizer], range(5, 6))
        before = [mmfsdp.model_state_dict(model, rank0_only=False), whole_state(model, optimizer)]
        for way in ("memory", "file"):
            try:
                if way == "memory":
                    state = mmfsdp.optim_state_dict(theirs, saved, rank0_only=False, param_names=True)
                    mmfsdp.load_optim_state_dict(model, optimizer, state)
                else:
                    mmfsdp.load_checkpoint(f"{folder}/{case}", model, optimizer)
            except StateDictError as error:
                found[f"{case} {way}"] = str(error)
        after = [mmfsdp.model_state_dict(model, rank0_only=False), whole_state(model, optimizer)]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    return found


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"]


@pytest.mark.exhaustive
def test_a_state_of_another_grouping_is_refused_whole(tmp_path: Any) -> None:
    for found in run_ranks(of_other_groupings, 2, str(tmp_path)):
        for case, (_, message) in OTHER_GROUPINGS.items():
            for way in ("memory", "file"):
                assert message in found.get(f"{case} {way}", "loaded"), (case, way)


def test_a_state_of_another_optimizer() -> None:
    with pytest.raises(StateDictError, match="Param group 0 has no entry 'optimizer'"):
        split_state(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())


def scaled(rank: int, scale: float) -> tuple[dict[str, torch.Tensor], float]:
    """Train with scaled losses; the second one overflows on one rank."""
    model = mmfsdp.shard(Deep(), {"wrap": "Block", "optimizer": OPTIMIZER})
    optimizer = mmfsdp.build_optimizer(model)
    scaler = mmfsdp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    for seed in range(3):
        loss = loss_of(model, batch(seed).chunk(dist.get_world_size())[rank])
        scaler.scale(loss * (float("inf") if seed == 1 and rank == 0 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights, scaler.get_scale()


@pytest.mark.exhaustive
def test_with_a_gradient_scaler() -> None:
    [(wanted, scale)] = run_ranks(scaled, 1, 1.0)
    assert scale == 0.5
    for found, scale in run_ranks(scaled, 2, 1024.0):
        assert scale == 512.0  # the step that overflowed was skipped on all ranks
        assert difference(found, wanted) < 5e-3
