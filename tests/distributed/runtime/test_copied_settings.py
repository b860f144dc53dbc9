"""What a user sets on the parameters of a layer while they are gathered, after an evaluation, reaches the shards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import mmfsdp
from mmfsdp import errors
from mmfsdp.basics.torch_releases import RUNS_UNITS_IN_PARTS, torch_has
from mmfsdp.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 4)
        self.stem.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


FEWER = {"strategy": "FULL_SHARD", "reshard_after_forward": 2}
CONFIGS: list[dict[str, Any]] = [
    {"sharding": "FULL_SHARD"},
    {"sharding": "SHARD_GRAD_OP"},
    {"sharding": "NO_SHARD"},
    {"sharding": "HYBRID_SHARD"},
    {"sharding": FEWER},
    {"compile": {"backend": "eager"}},
]


def build(config: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    model = Net()
    return model if config is None else mmfsdp.shard(model, wrap="Block", **config)


def rows() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(rows())
    model.train()


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def freeze_and_thaw(config: dict[str, Any] | None) -> list[dict[str, torch.Tensor]]:
    """Train, evaluate, freeze the head and a block, thaw the stem, set rates, train, and return the weights."""
    model = build(config)
    found = []
    rates = {}
    for moment in ("after an evaluation", "between steps", "while accumulating"):
        for _ in range(2):
            groups = [{"params": [param], "lr": 0.1 * rates.get(name, 1)} for name, param in model.named_parameters()]
            optimizer = torch.optim.SGD(groups, weight_decay=0.1)
            if moment == "while accumulating":
                with mmfsdp.no_sync(model) if isinstance(model, FSDPModule) else warnings.catch_warnings():
                    model(rows()).square().mean().backward()
                model.head.requires_grad_(True)
            model(rows()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: whole(param) for name, param in model.named_parameters()})
        if moment == "after an evaluation":
            evaluate(model)
            model.head.requires_grad_(False)
            model.blocks[0].layer.bias.requires_grad_(False)
            model.stem.requires_grad_(True)
            model.stem.weight.rate = 0.5
        rates = {name: getattr(param, "rate", 1) for name, param in model.named_parameters()}
        assert rates["stem.weight"] == 0.5
        evaluate(model)
    return found


def compare(rank: int) -> None:
    warnings.simplefilter("ignore")
    truth = freeze_and_thaw(None)
    assert torch.equal(truth[0]["head.weight"], truth[1]["head.weight"])  # it was frozen
    for config in CONFIGS:
        if config.get("sharding") == FEWER and not torch_has(RUNS_UNITS_IN_PARTS):
            continue  # what is set on shards of fewer ranks stays there
        try:
            torch.testing.assert_close(freeze_and_thaw(config), truth)
        except AssertionError as error:
            raise AssertionError(str(config)) from error


@pytest.mark.exhaustive
def test_settings_reach_the_shards() -> None:
    run_ranks(compare, 4)


def refuse(rank: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    ways = {
        "hook": lambda layer: layer.weight.register_hook(lambda grad: grad * 0),
        "later hook": lambda layer: layer.weight.register_post_accumulate_grad_hook(print),
        "init": lambda layer: nn.init.zeros_(layer.weight),
        "data": lambda layer: setattr(layer.weight, "data", torch.zeros_like(layer.weight)),
        "gradient": lambda layer: setattr(layer.weight, "grad", torch.ones_like(layer.weight)),
    }
    found: dict[str, list[str]] = {}
    for config in CONFIGS[:3]:
        for way, act in ways.items():
            model = build(config)
            model(rows()).sum().backward()
            evaluate(model)
            act(model.head)
            with pytest.raises(errors.ShardStateError) as caught:
                model(rows())
            found.setdefault(way, []).append(str(caught.value))
    return found


def test_what_would_be_lost_is_refused() -> None:
    expected = {
        "hook": "A gradient hook was registered with the gathered copy of 'head.weight'",
        "later hook": "A gradient hook was registered with the gathered copy of 'head.weight'",
        "init": "Values were written to the gathered copy of 'head.weight'",
        "data": "Values were written to the gathered copy of 'head.weight'",
        "gradient": "A gradient was set on the gathered copy of 'head.weight'",
    }
    for found in run_ranks(refuse, 2):
        for way, texts in found.items():
            assert all(expected[way] in text for text in texts), (way, texts)


def freeze_late(
    config: dict[str, Any] | None, part: str, is_on: bool, before: str = ""
) -> dict[str, torch.Tensor] | str:
    """Freeze or thaw a part between forward and backward, and return the weights after two steps, or the error.

    Args:
        config: What to shard with.
        part: FQN of a module, or of a parameter.
        is_on: Whether the part is trained after the forward.
        before: The flag changes while gradients are ``accumulated``; or step and ``zero`` the gradients before.
    """
    model = build(config)
    named = {plain_name(name): module for name, module in model.named_modules()}

    def train(is_trained: bool) -> None:
        params = {plain_name(name): param for name, param in model.named_parameters()}
        (named[part] if part in named else params[part]).requires_grad_(is_trained)

    def run(is_trained: bool) -> None:
        loss = model(rows()).square().mean()
        train(is_trained)
        loss.backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(not is_on)
    try:
        if before:
            run(not is_on)
        if before == "zero":
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            train(is_on)
        run(is_on)
    except errors.ShardStateError as error:
        return str(error)
    optimizer.step()
    optimizer.zero_grad()
    model(rows()).square().mean().backward()
    optimizer.step()
    with mmfsdp.full_params(model) if config else warnings.catch_warnings():
        return {plain_name(name): whole(param) for name, param in model.named_parameters()}


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def freezes_late(rank: int) -> list[tuple[str, bool, str]]:
    said = []
    for part in ("blocks.1", "head"):
        for is_on in (False, True):
            truth = freeze_late(None, part, is_on)
            torch.testing.assert_close(freeze_late({"sharding": "FULL_SHARD"}, part, is_on), truth)
            for sharding in STRATEGIES:
                got = freeze_late({"engine": "fsdp1", "sharding": sharding}, part, is_on)
                assert isinstance(got, str)
                said.append((part, is_on, got))
    return said


def test_fsdp1_refuses_units_that_are_frozen_between_forward_and_backward() -> None:
    for said in run_ranks(freezes_late, 2):
        # The head is all that is trained of its unit.
        assert {each[:2] for each in said} == {
            (part, is_on) for part in ("blocks.1", "head") for is_on in (True, False)
        }
        assert len(said) == 12
        for part, is_on, text in said:
            unit = "(root)" if part == "head" else part
            assert text.startswith(f"requires_grad of the parameters of the shard unit {unit!r} was set to {is_on} ")
            assert "or use engine 'fsdp2'." in text


def freezes_parts_late(rank: int) -> dict[tuple[Any, ...], str]:
    said = {}
    for part in ("blocks.1.layer.bias", "head.bias"):
        for is_on in (False, True):
            for before in ("", "accumulated", *(["zero"] if is_on else [])):
                truth = freeze_late(None, part, is_on, before)
                for sharding in STRATEGIES:
                    flat = freeze_late({"engine": "fsdp1", "sharding": sharding}, part, is_on, before)
                    if isinstance(flat, str):
                        said[part, is_on, before, sharding] = flat
                    else:
                        torch.testing.assert_close(flat, truth)
                    torch.testing.assert_close(freeze_late({"sharding": sharding}, part, is_on, before), truth)
    return said


def test_parts_of_units_that_are_frozen_between_forward_and_backward() -> None:
    """Engine fsdp1 has one gradient per unit; also on a rank whose shard has no part of the head."""
    for said in run_ranks(freezes_parts_late, 2):
        for (part, is_on, before, _), text in said.items():
            when = "between a forward and its backward" if is_on else "while gradients are accumulated"
            assert text.startswith(f"requires_grad of {part!r} was set to {is_on} {when}, which engine 'fsdp1'")
            assert (is_on, before) in {(True, ""), (True, "accumulated"), (False, "accumulated")}
        assert len(said) == 2 * 3 * len(STRATEGIES)
