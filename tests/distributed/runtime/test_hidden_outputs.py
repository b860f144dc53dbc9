"""Backwards that begin at tensors which no output shows: they train as one process does, or raise an error."""

from __future__ import annotations

import collections
import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

import mmfsdp
from mmfsdp import errors
from mmfsdp.testing import run_ranks


class Result:
    """Neither a tuple nor a dataclass."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.inner = {"losses": [loss]}

    @property
    def loss(self) -> torch.Tensor:
        return self.inner["losses"][0]


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.aux = nn.Linear(8, 8), how, [None]

    def forward(self, x: torch.Tensor) -> Any:
        y = x + torch.tanh(self.layer(x))
        if self.how == "kept in a unit":
            self.aux = [(self.layer(x).square().mean(),)]
        if self.how == "kept and returned":
            self.aux = [y]
        return Result(y) if self.how == "object of a unit" else y


class Net(nn.Module):
    """A root with layers of its own around two units."""

    def __init__(self, how: str, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.how, self.losses = how, lambda: losses  # nothing finds what a function holds
        self.stem, self.first, self.second, self.head = nn.Linear(8, 8), Block(how), Block(""), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, plain: bool = False) -> Any:
        x = self.first(self.stem(x))
        x = self.second(x.loss if isinstance(x, Result) else x)
        loss = self.head(x).square().mean()
        makes = {"object": Result, "slots": Slotted, "mapping": lambda loss: collections.UserDict(loss=loss)}
        if plain or self.how not in (*makes, "kept", "closure"):
            return loss
        self.kept = loss if self.how == "kept" else None
        self.losses()[:] = [loss]
        return makes[self.how](loss) if self.how in makes else loss.detach()


def loss_of(model: Any, output: Any, how: str) -> torch.Tensor:
    if how in ("object", "slots"):
        return output.loss
    if how == "kept in a unit":
        return model.first.aux[0][0] + 0 * output if model.training else model.first.aux[0][0]
    found = {"mapping": lambda: output["loss"], "kept": lambda: model.kept, "closure": lambda: model.losses()[0]}
    return found[how]() if how in found else output


WAYS = ("object", "slots", "mapping", "kept", "closure", "kept in a unit", "object of a unit")


def train(model: nn.Module, how: str, steps: str) -> list[dict[str, torch.Tensor | None]]:
    """Train with AdamW, which changes parameters with zero gradients; ``p`` is a plain step, ``a`` accumulates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    found = []
    model.eval()  # so that a loss in a unit comes alone
    for step in steps:
        if step == "a":
            with (
                mmfsdp.no_sync(model)
                if isinstance(model, FSDPModule | FullyShardedDataParallel)
                else contextlib.nullcontext()
            ):
                loss_of(model, model(rows), how).backward()
        output = model(rows, plain=step == "p")
        (output if step == "p" else loss_of(model, output, how)).backward()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    is_flat = isinstance(model, FullyShardedDataParallel)
    with mmfsdp.full_params(model, with_grads=True) if is_flat else contextlib.nullcontext():
        grads = {name.replace("_fsdp_wrapped_module.", ""): param.grad for name, param in model.named_parameters()}
        return {name: None if grad is None else whole(grad) for name, grad in grads.items()}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def build(how: str, config: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net(how, [])
    return model if config is None else mmfsdp.shard(model, **config)


def compare(rank: int, configs: list[dict[str, Any]], ways: list[str]) -> None:
    warnings.simplefilter("ignore")
    for how in ways:
        for steps in ("--", "-p-", "a-"):
            truth = train(build(how, None), how, steps)
            for config in configs:
                got = train(build(how, config), how, steps)
                try:
                    torch.testing.assert_close(got, truth)
                except AssertionError as error:
                    raise AssertionError(f"{how}, {config}, {steps!r}") from error


FSDP2 = [
    {"wrap": "none", "sharding": "FULL_SHARD"},
    {"wrap": "Block", "sharding": "FULL_SHARD"},
    {"wrap": "Block", "sharding": "SHARD_GRAD_OP"},
    {"wrap": "Block", "sharding": "NO_SHARD"},
]


@pytest.mark.exhaustive
def test_a_loss_beside_the_output_trains_as_in_one_process() -> None:
    run_ranks(compare, 2, FSDP2, [*WAYS])


@pytest.mark.exhaustive
def test_checkpoints_and_compiled_units() -> None:
    configs: list[dict[str, Any]] = [
        {**FSDP2[1], "activation_checkpointing": {"mode": "full", "modules": ["Block"]}},
        {**FSDP2[1], "compile": {"backend": "eager"}},
    ]
    run_ranks(compare, 2, configs, ["object", "kept in a unit", "object of a unit"])


@pytest.mark.exhaustive
def test_flat_parameters() -> None:
    configs: list[dict[str, Any]] = [
        {"wrap": "Block", "engine": "fsdp1", "sharding": kind} for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    ]
    run_ranks(compare, 2, configs, ["object", "mapping", "kept", "object of a unit", "kept and returned"])


def flat(rank: int) -> str:
    warnings.simplefilter("ignore")
    with pytest.raises(errors.ShardStateError) as caught:
        train(build("closure", {"wrap": "none", "engine": "fsdp1"}), "closure", "-")
    return str(caught.value)


def test_flat_parameters_refuse_a_backward_that_torch_does_not_see() -> None:
    """Torch prints the stack and raises an assertion."""
    for text in run_ranks(flat, 2):
        assert "A backward reached the shard unit '(root)', but no output of it" in text
        assert "Return the tensor from the forward, or use engine 'fsdp2'." in text


class Adjoint(torch.autograd.Function):
    """Computes gradients of parameters in a backward of its own, as torchdiffeq's adjoint method does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.params = module, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(x + ctx.module(x), (x, *ctx.params), grad, allow_unused=True)
        given = zip((x, *ctx.params), found, strict=True)
        return None, *(torch.zeros_like(value) if part is None else part for value, part in given)


class Dynamics(nn.Sequential):
    pass


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dynamics, self.out = Dynamics(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)
        self.how = "at once"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.out(checkpoint(self.dynamics, x.requires_grad_(), use_reentrant=True))
        if self.how == "reentrant":
            return self.out(checkpoint(self.solve, x.requires_grad_(), use_reentrant=True))
        return self.out(self.solve(x))

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Adjoint.apply(self.dynamics, x, *self.dynamics.parameters())  # type: ignore[no-untyped-call]
        return found


def adjoint(rank: int) -> list[Any]:
    warnings.simplefilter("ignore")
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    for config in (
        None,
        {"wrap": "none"},
        *({"wrap": "Dynamics", "sharding": kind} for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
        {"wrap": "Dynamics", "engine": "fsdp1"},
    ):
        torch.manual_seed(0)
        model: nn.Module = Flow()
        model = model if config is None else mmfsdp.shard(model, **config)
        try:
            model(rows).square().mean().backward()
            found.append({name: whole(param.grad) for name, param in model.named_parameters()})
        except errors.UnsupportedCallError as error:
            found.append(str(error))
    return found


def test_functions_that_get_shards_are_refused_in_the_forward() -> None:
    for truth, in_root, *refused in run_ranks(adjoint, 2):
        torch.testing.assert_close(in_root, truth)
        for text in refused:
            assert "The autograd function Adjoint got 'dynamics.0.bias', 'dynamics.0.weight' as arguments" in text


def adjoint_unseen(rank: int, configs: list[dict[str, Any]]) -> list[str]:
    """Run the function where no output of the first forward leads to it."""
    warnings.simplefilter("ignore")
    found = []
    for how, config in itertools.product(("at once", "reentrant", "plain", "outside"), configs):
        grads = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = mmfsdp.shard(Flow(), wrap="Dynamics", **config) if is_sharded else Flow()
            inner(model).how = "plain"
            rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
            model(rows).square().mean().backward()
            inner(model).how = how
            # Gradients of shards are right where they are those of a penalty.
            penalty = sum(whole_sum(param) for param in model.parameters())
            output = inner(model).solve(rows) if how == "outside" else model(rows)
            loss = output.square().mean() + penalty
            try:
                loss.backward()
                grads.append(gradients(model))
            except errors.UnsupportedCallError as error:
                found.append(str(error))
        if how == "plain":
            torch.testing.assert_close(grads[1], grads[0])
    return found


def inner(model: Any) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def whole_sum(param: Any) -> torch.Tensor:
    total: Any = param.square().sum()
    return total.full_tensor() if hasattr(total, "full_tensor") else total  # type: ignore[no-any-return]


def test_functions_that_get_shards_are_refused_in_the_backward_elsewhere() -> None:
    """Without it, the gradients of the unit are zero in later forwards, and under reentrant checkpoints."""
    configs: list[dict[str, Any]] = [{}]
    configs += [{"engine": "fsdp1", "sharding": kind} for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]
    for texts in run_ranks(adjoint_unseen, 2, configs):
        assert len(texts) == 3 * len(configs)
        for text in texts:
            assert "Shards of the unit 'dynamics" in text
            assert "Leave the module out of the wrap policy" in text


def _one_unit(model: Any, rows: torch.Tensor) -> None:
    model.first(rows.requires_grad_()).square().mean().backward()


def _after_an_unused_forward(model: Any, rows: torch.Tensor) -> None:
    output = model.first(rows.requires_grad_())
    model(rows.detach())
    model.second(output).square().mean().backward()


def _two_losses(model: Any, rows: torch.Tensor) -> None:
    (model(rows) + model.second(rows.requires_grad_()).square().mean()).backward()


def _two_graphs(model: Any, rows: torch.Tensor) -> None:
    losses = [model(rows), model(rows + 1)]
    for loss in losses:
        loss.backward()


def _twice(model: Any, rows: torch.Tensor) -> None:
    loss = model(rows)
    loss.backward(retain_graph=True)
    loss.backward()


def _layer_by_layer(model: Any, rows: torch.Tensor) -> None:
    first = model.first(rows.requires_grad_())
    between = first.detach().requires_grad_()
    model.second(between).square().mean().backward()
    first.backward(between.grad)


class Reached:
    """Shows the units of a model, under whatever wrapper, and calls the model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first, self.second = inner(model).first, inner(model).second

    def __call__(self, rows: torch.Tensor) -> Any:
        return self.model(rows)


def backwards_of_units(rank: int, kinds: list[str]) -> list[str]:
    warnings.simplefilter("ignore")
    refused = []
    rows = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for act in (_one_unit, _after_an_unused_forward, _two_losses, _two_graphs, _twice, _layer_by_layer):
        truth = build("", None)
        optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
        for _ in range(2):
            for part in rows:
                act(truth, part.detach().clone())
            for param in truth.parameters():
                if param.grad is not None:
                    param.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        for config in ({}, *({"engine": "fsdp1", "sharding": kind} for kind in kinds)):
            model = build("", {"wrap": "Block", **config})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                for _ in range(2):
                    act(Reached(model), rows[rank].detach().clone())
                    optimizer.step()
                    optimizer.zero_grad()
            except errors.ShardStateError as error:
                refused.append(f"{act.__name__}: {error}")
                continue
            with mmfsdp.full_params(model):
                got = {
                    name.replace("_fsdp_wrapped_module.", ""): whole(param) for name, param in model.named_parameters()
                }
            torch.testing.assert_close(got, {name: whole(param) for name, param in truth.named_parameters()})
    return refused


def test_backwards_that_begin_at_units() -> None:
    """With torch's FSDP1 they train nothing, do not reduce gradients with NO_SHARD, or fail in freed memory."""
    kinds = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    for refused in run_ranks(backwards_of_units, 2, kinds):
        assert [text.split(":")[0] for text in refused] == [
            name for name in ("_two_graphs", "_twice", "_layer_by_layer") for _ in kinds
        ]
        for text in refused:
            assert "and another backward has ended since the unit's forward. Engine 'fsdp1' gathers" in text
