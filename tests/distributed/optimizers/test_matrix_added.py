"""Parameters that come or go after an optimizer of matrices was planned or built are trained, or named in an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.optimizers.test_matrix_optimizer import plain, set_and_step, set_gradients
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, PlanError, ShardStateError
from mmfsdp.testing import run_ranks, single_rank


def raised(function: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds) as caught:
        function()
    return str(caught.value)


def added_to_the_model(model: nn.Module) -> str:
    model.register_parameter("extra", nn.Parameter(torch.randn(4, 4)))
    return raised(lambda: mmfsdp.build_optimizer(model), ShardStateError)


def trained_later(model: nn.Module) -> str:
    model.get_parameter("2.bias").requires_grad_(True)
    return raised(lambda: mmfsdp.build_optimizer(model), ShardStateError)


def added_to_the_optimizer(model: nn.Module) -> str:
    optimizer = mmfsdp.build_optimizer(model)
    set_and_step(model, [optimizer], range(1))
    model.register_parameter("extra", nn.Parameter(torch.randn(4, 4)))
    optimizer.add_param_group({"params": [model.extra], "optimizer": "muon"})
    set_gradients(model, 1)
    return raised(optimizer.step, ShardStateError)


def of_no_optimizer(model: nn.Module) -> str:
    optimizer = mmfsdp.build_optimizer(model)
    return raised(lambda: optimizer.add_param_group({"params": [torch.zeros(2, 2)], "lr": 1.0}), ConfigError)


def without_settings(model: nn.Module) -> str:
    optimizer = mmfsdp.build_optimizer(model)
    group = {"params": [torch.zeros(2, 2)], "optimizer": "muon", "lr": 1.0}
    return raised(lambda: optimizer.add_param_group(group), ConfigError)


def no_matrix(model: nn.Module) -> str:
    optimizer = mmfsdp.matrix_optimizer(model, lambda matrix, *_: matrix)
    set_gradients(model, 0)
    return raised(optimizer.step, PlanError)


CASES: dict[Callable[[nn.Module], str], str] = {
    added_to_the_model: "'extra' would be trained by no optimizer: added to the model, or set to require a gradient",
    trained_later: "'2.bias' would be trained by no optimizer",
    added_to_the_optimizer: "holds 'extra', which was added to the model after it was sharded",
    of_no_optimizer: "says by optimizer='muon' or 'adamw' who updates it, got None",
    without_settings: "A param group of muon lacks 'weight_decay', 'momentum', 'nesterov'",
    no_matrix: "'1.bias': A parameter of shape (6,) is not a matrix. Give it to another optimizer.",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_named(case: Callable[[nn.Module], str]) -> None:
    model = plain()
    if case is trained_later:
        model[2].bias.requires_grad_(False)
    muon = None if case is without_settings else "auto"
    with single_rank():
        assert CASES[case] in case(mmfsdp.shard(model, {"optimizer": {"lr": 0.02, "muon": muon}}))


def unfrozen(rank: int) -> dict[str, torch.Tensor]:
    """Add two parameters that were frozen at first."""
    model = plain()
    model[2].requires_grad_(False)
    model = mmfsdp.shard(model, {"optimizer": {"lr": 0.02}})
    optimizer = mmfsdp.build_optimizer(model)
    set_and_step(model, [optimizer], range(1))
    for name, kind in (("2.weight", "muon"), ("2.bias", "adamw")):
        param = model.get_parameter(name).requires_grad_(True)
        optimizer.add_param_group({"params": [param], "optimizer": kind})
    set_and_step(model, [optimizer], range(1, 2))
    weights: dict[str, torch.Tensor] = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights


def test_groups_that_are_added_are_updated() -> None:
    model = plain()
    params = dict(model.named_parameters())
    muon = torch.optim.Muon([params["1.weight"]], lr=0.02)
    adamw = torch.optim.AdamW([params["0.weight"], params["1.bias"]])
    set_and_step(model, [muon, adamw], range(1))
    muon.add_param_group({"params": [params["2.weight"]]})
    adamw.add_param_group({"params": [params["2.bias"]]})
    set_and_step(model, [muon, adamw], range(1, 2))
    for weights in run_ranks(unfrozen, 2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
