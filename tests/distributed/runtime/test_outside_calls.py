"""Layers inside a shard unit that code outside of the unit calls, against the same training in one process."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.testing import run_ranks, single_rank

DIM = 6


class Stage(nn.Module):
    """A unit with layers, a Sequential, and methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.layer4 = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer4(self.fc(x).tanh())

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer4[1](self.fc(x)).sin()

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self(self.fc(self(x))))


class Head(nn.Module):
    """A detector's head: its branches are called by a decoder as well."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in "ab")
        self.fc = nn.Linear(DIM, 3)

    def forward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return sum(self.fc(branch(x)) for branch, x in zip(self.branches, outputs, strict=True))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in "ab")

    def forward(self, x: torch.Tensor, branches: nn.ModuleList) -> list[torch.Tensor]:
        outputs = []
        for layer, branch in zip(self.layers, branches, strict=True):
            x = layer(x).tanh()
            x = x + branch(x).detach().sigmoid() + branch(x)
            outputs.append(x)
        return outputs


class Net(nn.Module):
    """The parts, and a forward that a case gives."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Linear(DIM, DIM)
        self.backbone, self.neck = Stage(), Stage()
        self.decoder, self.head = Decoder(), Head()
        if case == "tied":
            self.decoder.layers[1].weight = self.neck.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CASES[self.case](self, x)


def whole(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.head(net.decoder(net.neck(net.backbone(net.embed(x))), net.head.branches))


def loss_calls_a_layer(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.backbone(x)
    return net.head.fc(x) + net.head.fc(net.backbone.layer4(net.neck(x))).square() + net.head([x, x])


def layers_only(net: Net, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = net.neck.fc(net.backbone.fc(x)) + x
    return net.head.fc(x)


def methods(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.backbone.extract(net.embed(x))
    return net.head.fc(net.neck.again(net.neck(x)))


def checkpointed(net: Net, x: torch.Tensor) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        return net.neck.fc(net.backbone(net.backbone.layer4(x)))

    x = checkpoint(region, net.embed(x), use_reentrant=False)
    return whole(net, checkpoint(net.backbone.fc, x, use_reentrant=False))


def reentrant(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Runs units, and a layer of one, again in backward after their backward has run: torch alone loses gradients."""
    x = checkpoint(net.backbone.fc, net.embed(x), use_reentrant=True)
    for _ in range(2):
        x = checkpoint(net.neck, x, use_reentrant=True)
    return whole(net, x)


def run_over(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Calls children of a Sequential that is a unit under some policies, besides calling it."""
    x = net.neck.layer4[3](net.neck.layer4[1](x))
    return net.head(net.decoder(net.neck.layer4[1](net.neck(x)), net.head.branches))


CASES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "detr": whole,
    "loss": loss_calls_a_layer,
    "layers": layers_only,
    "methods": methods,
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    "run-over": run_over,
    "tied": lambda net, x: whole(net, net.neck.layer4(net.decoder.layers[1](net.neck.fc(x)))),
}
POLICIES: dict[str, dict[str, Any]] = {
    "class": {"kind": "module_class", "classes": ["Stage", "Head", "Decoder"]},
    "name": {"kind": "module_name", "patterns": ["backbone", "neck", "neck.layer4", "head", "head.branches.*"]},
    "size": {"kind": "size", "min_num_params": 100},
}
METHODS = ["extract", "again"]
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-grad-op": {"engine": "fsdp2", "sharding": {"strategy": "SHARD_GRAD_OP", "forward_methods": METHODS}},
    "fsdp2-checkpointing": {"engine": "fsdp2", "activation_checkpointing": "full"},
    "replicate": {"engine": "replicate"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-checkpointing": {"engine": "fsdp1", "activation_checkpointing": "full"},
    "fsdp1-flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
    "fsdp1-grad-op": {"engine": "fsdp1", "sharding": {"strategy": "SHARD_GRAD_OP", "forward_methods": METHODS}},
}
HYBRID: dict[str, Any] = {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}


def curve(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Losses of two steps, whose inputs need no gradient first and then do, with a prediction after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for needs_grad in (False, True):
        loss = model(x.clone().requires_grad_(needs_grad)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.detach(), model(x).mean()]
    return found


def compare(rank: int, settings: dict[str, Any], wrap: str, cases: list[str]) -> dict[str, float]:
    """How far weights and losses are from those of one process, at most, by case."""
    world = dist.get_world_size()
    found = {}
    for case in cases:
        torch.manual_seed(3)
        alone = Net(case)
        model = mmfsdp.shard(copy.deepcopy(alone), {"wrap": POLICIES[wrap], **settings})
        x = torch.randn(2 * world, DIM)
        losses = torch.stack(curve(model, x.chunk(world)[rank]))
        dist.all_reduce(losses)
        worst = (losses / world - torch.stack(curve(alone, x))).abs().max()
        weights = mmfsdp.model_state_dict(model, rank0_only=False)
        found[case] = max(worst, *((weights[name] - want).abs().max() for name, want in alone.state_dict().items()))
    return {case: value.item() for case, value in found.items()}


# Where units are kept, regathered or recomputed otherwise, or begin elsewhere, the cases that this changes.
SOME = {
    "fsdp2-grad-op": ["detr", "methods", "run-over"],
    "fsdp2-checkpointing": ["checkpointed", "reentrant", "run-over"],
    "replicate": ["detr", "checkpointed", "run-over"],
    "fsdp1-checkpointing": ["checkpointed", "reentrant", "run-over"],
    "fsdp1-grad-op": ["methods", "checkpointed", "run-over"],
}


@pytest.mark.sample("fsdp2-grad-op", "fsdp1-checkpointing")
@pytest.mark.parametrize("engine", ENGINES)
def test_trains_as_one_process(engine: str) -> None:
    """Fails without `route`: torch mixes shards and tensors."""
    cases = SOME.get(engine, [*CASES])
    for found in run_ranks(compare, 2, ENGINES[engine], "class", cases):
        assert found == pytest.approx(dict.fromkeys(cases, 0), abs=1e-5)


@pytest.mark.sample("fsdp2-name")
@pytest.mark.parametrize(("engine", "wrap"), [("fsdp2", "name"), ("fsdp2", "size"), ("fsdp1-flat", "name")])
def test_with_other_units(engine: str, wrap: str) -> None:
    cases = ["detr", "run-over", "tied"]
    for found in run_ranks(compare, 2, ENGINES[engine], wrap, cases):
        assert found == pytest.approx(dict.fromkeys(cases, 0), abs=1e-5)


@pytest.mark.sample("fsdp1")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_in_hybrid_groups(engine: str) -> None:
    cases = ["detr", "methods"]
    for found in run_ranks(compare, 4, {"engine": engine, **HYBRID}, "class", cases):
        assert found == pytest.approx(dict.fromkeys(cases, 0), abs=1e-5)


class Parts(nn.Module):
    """Units and a layer of the root, which a training loop of the user's own calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.neck, self.head = Stage(), Stage(), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck.fc(self.backbone.layer4(self.backbone(x))))


FLAT = {"engine": "fsdp1", "sharding": {"use_orig_params": False}}
WRAP = {"wrap": {"kind": "module_class", "classes": "Stage"}}


def two_of(settings: dict[str, Any]) -> tuple[nn.Module, nn.Module, Any]:
    """A sharded model, the same unsharded, and the sharded one's parts."""
    torch.manual_seed(0)
    alone = Parts()
    model = mmfsdp.shard(copy.deepcopy(alone), {**WRAP, **settings})
    return model, alone, model if isinstance(model, Parts) else model.module


def by_parts(rank: int, settings: dict[str, Any]) -> float:
    """Trains layer by layer, before the root was ever called, over several micro-batches of which one is predicted."""
    model, alone, parts = two_of(settings)
    x = torch.randn(4, DIM)
    with torch.no_grad():
        assert torch.allclose(parts.backbone.fc(x), alone.backbone.fc(x))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, alone)]
    for _ in range(2):
        for net, inputs in ((parts, x.chunk(2)[rank]), (alone, x)):
            net.head(net.neck.layer4(net.backbone.fc(inputs))).square().mean().backward()
            net.head(net.neck(inputs)).square().mean().backward()
        with mmfsdp.no_sync(model):
            model(x.chunk(2)[rank]).square().mean().backward()
        for net, inputs in ((model, x.chunk(2)[rank]), (alone, x)):
            net(inputs).square().mean().backward()
        alone(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    return max((weights[name] - want).abs().max().item() for name, want in alone.state_dict().items())


def in_bfloat16(rank: int, settings: dict[str, Any]) -> float:
    """Calls from outside cast their inputs as the unit's forward does; with fsdp2 also when they are recomputed."""
    model, alone, parts = two_of({**settings, "precision": "bf16"})
    x = torch.randn(4, DIM)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for net, start in zip((parts, alone), inputs, strict=True):

        def region(value: torch.Tensor, net: Any = net) -> torch.Tensor:
            return net.neck.fc(net.backbone.fc(value).float()).float()

        # torch's FSDP1 casts nothing in a recomputation.
        result = region(start) if settings else checkpoint(region, start, use_reentrant=False)
        result.square().sum().backward()
    error = (model(x).float() - alone(x)).abs().max()
    return max(error, (inputs[0].grad - inputs[1].grad).abs().max()).item()


def in_full_precision(rank: int) -> list[torch.dtype]:
    """A unit kept in float32 is given bfloat16 from outside, by a call of the unit and of a layer in it."""
    *_, parts = two_of({"precision": {"param_dtype": "bfloat16", "ignore_classes": ["Stage"]}})
    x = torch.randn(4, DIM, dtype=torch.bfloat16)
    results = [parts.neck(x), parts.neck.fc(x)]
    sum(result.sum() for result in results).backward()
    return [result.dtype for result in results]


def compiled(rank: int, settings: dict[str, Any]) -> tuple[float, dict[str, int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()  # dynamo goes through torch's table of modules, which models that die meanwhile leave
    model, alone, _ = two_of(settings)
    run = torch.compile(model, backend="eager")
    x = torch.randn(4, DIM)
    for _ in range(3):
        error = (run(x) - alone(x)).abs().max().item()
        run(x).sum().backward()
    return error, dict(torch._dynamo.utils.counters["recompile_limit"])


def copied(rank: int) -> tuple[str, bool, str]:
    """What code that looks at a layer's forward, or copies the layer, finds."""
    *_, parts = two_of({})
    layer = copy.deepcopy(parts.backbone.layer4)
    plain = all(type(module.forward).__name__ == "method" for module in (layer, layer[1]))
    assert layer[1].forward.__self__ is layer[1]
    return str(inspect.signature(parts.backbone.fc.forward)), plain, type(parts).__name__


@pytest.mark.parametrize("settings", [{}, {"engine": "fsdp1"}, FLAT], ids=["fsdp2", "fsdp1", "flat"])
class TestEngines:
    def test_parts_in_a_loop_of_the_users(self, settings: dict[str, Any]) -> None:
        assert run_ranks(by_parts, 2, settings) == pytest.approx([0, 0], abs=1e-5)

    def test_mixed_precision(self, settings: dict[str, Any]) -> None:
        assert run_ranks(in_bfloat16, 2, settings) == pytest.approx([0, 0], abs=0.02)

    @pytest.mark.sample("flat")
    def test_compiled(self, settings: dict[str, Any]) -> None:
        assert run_ranks(compiled, 2, settings) == [(pytest.approx(0, abs=1e-5), {})] * 2


def test_a_unit_kept_in_full_precision() -> None:
    assert run_ranks(in_full_precision, 2) == [[torch.bfloat16, torch.bfloat16]] * 2


def test_layers_look_and_copy_as_they_did() -> None:
    expected = str(inspect.signature(nn.Linear(1, 1).forward))
    assert run_ranks(copied, 2) == [(expected, True, "Parts")] * 2


class Reader(Stage):
    """A unit with methods that read weights, and do not call the layers that hold them."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.fc.weight, self.fc.bias)

    def later(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self(x), self.fc.weight)


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.backbone, self.head = Reader(), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "local":
            weight = self.backbone.fc.weight
            return self.head(F.linear(x, weight))
        if self.how == "getter":
            return self.head(self.multiply(x, self.part().weight))
        if self.how == "line":
            return self.head(
                F.linear(
                    x,
                    self.backbone.layer4[1].weight.T,
                )
            )
        return self.head(getattr(self.backbone, self.how)(x))

    def part(self) -> nn.Module:
        return self.backbone.fc

    @staticmethod
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach()  # as fused losses do in autograd functions
        return F.linear(x, weight)


def read(rank: int, hows: list[str], settings: dict[str, Any]) -> list[str]:
    """For each way to read weights, whether the result is right, or what is noted on the error."""
    return [read_once(how, settings) for how in hows]


def read_once(how: str, settings: dict[str, Any]) -> str:
    wrap = {"wrap": {"kind": "module_class", "classes": "Reader"}}
    torch.manual_seed(0)
    alone = Reads(how)
    model = mmfsdp.shard(copy.deepcopy(alone), {**wrap, **settings})
    x = torch.randn(2, DIM)
    try:
        return str(torch.allclose(model(x), alone(x), atol=1e-6))
    except RuntimeError as error:
        return "".join(getattr(error, "__notes__", []))


UNGATHERED = "while the shard unit 'backbone' was not gathered: "
OUT = (
    "or change the wrap policy so that 'backbone' is not a unit of its own "
    "(exclude_wrap_modules=['Reader'] in MMEngine's size policy)."
)
LISTED = {"forward_methods": ["project", "later"]}


READS = [
    ("project", "'backbone' (Reader) computed in project()", "fc.weight", "List the method ('project')"),
    ("later", "'backbone' (Reader) computed in later()", "fc.weight", "List the method ('later')"),
    ("local", "'(root)' (Reads) computed in forward()", "fc.weight", "Read them in a method of 'backbone', listed"),
    ("line", "'(root)' (Reads) computed in forward()", "layer4.1.weight", "Read them in a method of 'backbone', li"),
]


@pytest.mark.parametrize("settings", [{}, {"engine": "fsdp1"}, FLAT], ids=["fsdp2", "fsdp1", "flat"])
def test_weights_that_are_read_are_named(settings: dict[str, Any]) -> None:
    """Reading is no call, so nothing can gather for it. Fails without diagnostics.py."""
    for *notes, getter in run_ranks(read, 2, [*(how for how, *_ in READS), "getter"], settings):
        if "engine" not in settings:
            assert "code computed in multiply() with 'backbone.fc.weight', " + UNGATHERED in getter
        for note, (_, reader, weight, remedy) in zip(notes, READS, strict=True):
            assert note.startswith(f"mmfsdp: {reader} with 'backbone.{weight}'")
            assert UNGATHERED + "code other than the unit's forward reads them. " + remedy in note
            assert note.endswith(f" in sharding.forward_methods, {OUT}")


@pytest.mark.parametrize("settings", [{}, {"engine": "fsdp1"}, FLAT], ids=["fsdp2", "fsdp1", "flat"])
def test_methods_that_read_are_listed(settings: dict[str, Any]) -> None:
    settings = {**settings, "sharding": {**settings.get("sharding", {}), **LISTED}}
    freed = (
        "the method 'later' ran the unit's forward, which frees them when it ends. Read them before that, or call the "
        "layer that holds them, "
    )
    for project, later in run_ranks(read, 2, ["project", "later"], settings):
        assert project == "True"
        assert later == "True" or ("engine" not in settings and later.endswith(UNGATHERED + freed + OUT))


class Reversible(torch.autograd.Function):
    """Keeps no activations: in backward, layers compute their inputs from their outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        for layer in layers:
            left, right = layer(left, right)
        ctx.save_for_backward(left.detach(), right.detach())
        ctx.layers = layers
        return torch.cat([left, right], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        parts = (*ctx.saved_tensors, *grad.chunk(2, -1))
        for layer in reversed(ctx.layers):
            parts = layer.backward_pass(*parts)
        return torch.cat(parts[2:], -1), None


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = left + self.first(right).tanh()
        return left, right + self.second(left).tanh()

    def backward_pass(self, left: torch.Tensor, right: torch.Tensor, of_left: Any, of_right: Any) -> Any:
        with torch.enable_grad():
            left = left.detach().requires_grad_()
            added = self.second(left).tanh()
            added.backward(of_right)
        right, of_left = (right - added).detach(), of_left + left.grad
        with torch.enable_grad():
            right.requires_grad_()
            added = self.first(right).tanh()
            added.backward(of_left)
        return left - added, right, of_left, of_right + right.grad


class Couplings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, 2 * DIM)
        self.layers = nn.ModuleList(Coupling() for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Reversible.apply(self.stem(x), self.layers)
        return result


def test_reversible_networks_list_what_runs_in_backward() -> None:
    torch.manual_seed(0)
    plain, x = Couplings(), torch.randn(3, DIM)
    plain(x).square().sum().backward()
    wrap = {"kind": "module_class", "classes": ["Coupling"]}
    with single_rank():
        model = mmfsdp.shard(copy.deepcopy(plain), {"wrap": wrap})
        with pytest.raises(ShardStateError, match=r"Linear of a Coupling was called in backward.*'backward_pass'"):
            model(x).square().sum().backward()
        model = mmfsdp.shard(copy.deepcopy(plain), {"wrap": wrap, "sharding": {"forward_methods": ["backward_pass"]}})
        model.zero_grad()
        model(x).square().sum().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), plain.get_parameter(name).grad)
