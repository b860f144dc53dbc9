"""Backwards that begin at tensors which no output shows: they train as one process does, or raise an error."""

from __future__ import annotations

import collections
import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

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
        return Result(y) if self.how == "object of a unit" else y


class Net(nn.Module):
    """A root with layers of its own around two units."""

    def __init__(self, how: str, losses: list[torch.Tensor]) -> None:
        super().__init__()
        self.how, self.losses = how, losses
        self.stem, self.first, self.second, self.head = nn.Linear(8, 8), Block(how), Block(""), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, plain: bool = False) -> Any:
        x = self.first(self.stem(x))
        x = self.second(x.loss if isinstance(x, Result) else x)
        loss = self.head(x).square().mean()
        makes = {"object": Result, "slots": Slotted, "mapping": lambda loss: collections.UserDict(loss=loss)}
        if plain or self.how not in (*makes, "kept", "closure"):
            return loss
        self.kept = loss if self.how == "kept" else None
        self.losses[:] = [loss]
        return makes[self.how](loss) if self.how in makes else loss.detach()


def loss_of(model: Any, output: Any, how: str) -> torch.Tensor:
    if how in ("object", "slots"):
        return output.loss
    if how == "kept in a unit":
        return model.first.aux[0][0] + 0 * output if model.training else model.first.aux[0][0]
    found = {"mapping": lambda: output["loss"], "kept": lambda: model.kept, "closure": lambda: model.losses[0]}
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
            with mmfsdp.no_sync(model) if isinstance(model, FSDPModule) else contextlib.nullcontext():
                loss_of(model, model(rows), how).backward()
        output = model(rows, plain=step == "p")
        (output if step == "p" else loss_of(model, output, how)).backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        found.append({name: None if grad is None else whole(grad) for name, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


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
                if how == "closure" and config["sharding"] == "FULL_SHARD" and config["wrap"] != "none":
                    continue
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


def test_a_loss_beside_the_output_trains_as_in_one_process() -> None:
    run_ranks(compare, 2, FSDP2, [*WAYS])


def test_checkpoints_and_compiled_units() -> None:
    configs: list[dict[str, Any]] = [
        {**FSDP2[1], "activation_checkpointing": {"mode": "full", "modules": ["Block"]}},
        {**FSDP2[1], "compile": {"backend": "eager"}},
    ]
    run_ranks(compare, 2, configs, ["object", "kept in a unit", "object of a unit"])


def flat(rank: int, how: str) -> str:
    warnings.simplefilter("ignore")
    with pytest.raises(errors.UnsupportedCallError) as caught:
        train(build(how, {"wrap": "Block", "engine": "fsdp1"}), how, "-")
    return str(caught.value)


@pytest.mark.parametrize(("how", "name"), [("object", "Net"), ("kept", "Net"), ("object of a unit", "Block")])
def test_flat_parameters_refuse_what_torch_would_not_reach(how: str, name: str) -> None:
    for text in run_ranks(flat, 2, how):
        assert f"{name} returned no tensor with a gradient, but an object that holds one" in text
        assert "or use engine 'fsdp2'" in text


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(Adjoint.apply(self.dynamics, x, *self.dynamics.parameters()))  # type: ignore[no-untyped-call]


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
