"""Rehearsals of models that ask for values, and of optimizers by any name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError, RehearsalError
from mmfsdp.planning import estimate_memory
from mmfsdp.rehearsal import Rehearsal, optimizer_from

ROWS, WIDTH = 40, 16


class Asks(nn.Module):
    """Asks for values: of constants, or of what it computes."""

    def __init__(self, ask: str) -> None:
        super().__init__()
        self.ask, self.linear = ask, nn.Linear(WIDTH, WIDTH)
        self.anchors = [torch.arange(6.0).reshape(3, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        return getattr(self, self.ask)(found)

    def constants(self, found: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([3, 5])
        if (8 - sizes).sum() != 8:
            raise AssertionError
        kept = self.anchors[0][self.anchors[0][:, 0] > 1]  # 2 of 3 rows
        places = torch.arange(found.shape[0])
        return found[places[places % 4 == 0]] * kept.sum() + found.new_zeros(int(sizes.max()), 1, 1).sum()

    def checked(self, found: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(found).all()
        if found.isnan().any() or torch.isinf(found).sum() > 0:
            raise FloatingPointError
        return found

    def shown(self, found: torch.Tensor) -> torch.Tensor:
        return found * len(f"{found.mean():.3f}")

    def overwritten(self, found: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[found.argmax(0)] = True
        return found if mask.view(-1).any() else -found

    def masks(self, found: torch.Tensor) -> torch.Tensor:
        positive = found[:, 0] > 0
        rows = positive.nonzero().squeeze(1)
        chosen = found[positive] + found[rows]
        chosen[chosen > 1] = 0.0
        assert positive.any()
        assert found.detach().masked_select(positive[:, None]).numel() == 10 * WIDTH
        assert found.detach().numpy().shape == (ROWS, WIDTH)
        assert positive.long().unique().numel() == ROWS
        return chosen * positive.sum().item()


def asked(ask: str, **settings: Any) -> Rehearsal:
    return mmfsdp.rehearse(None, Asks(ask), torch.empty(ROWS, WIDTH), mesh=2, device_type="cpu", **settings)


def made(step: Rehearsal, nbytes: int) -> int:
    return sum(item.nbytes == nbytes and item.kind == "activation" for item in step.allocations)


def test_sync_batch_norm_sends_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))
    step = mmfsdp.rehearse({"engine": "replicate"}, model, torch.empty(2, 3, 8, 8), mesh=4)
    # Means, inverse deviations and a count of each of 4 ranks; two sums per channel.
    found = [(item.name, item.nbytes, item.phase) for item in step.collectives]
    assert ("all_gather", 4 * 4 * (2 * 8 + 1), "forward") in found
    assert ("all_reduce", 4 * 2 * 8, "backward") in found


def test_constants_have_values() -> None:
    step = asked("constants")
    assert made(step, 4 * ROWS * WIDTH) == 1  # of the linear layer
    assert made(step, 4 * ROWS // 4 * WIDTH) >= 2  # selected rows, and their product


def test_values_are_finite() -> None:
    step = asked("checked")
    assert made(step, ROWS * WIDTH) == 5  # masks of one byte: three of isfinite(), and one each of the others
    with pytest.raises(RehearsalError, match=r"needs the values of a tensor at .*:\.3f"):
        asked("shown")


def test_what_is_written_into_a_constant_may_be_unknown() -> None:
    with pytest.raises(RehearsalError, match=r"needs the values of a tensor at .*mask.view\(-1\).any\(\).*assume=0.1"):
        asked("overwritten")
    asked("overwritten", assume=0.5)


def test_masks_select_the_assumed_share() -> None:
    with pytest.raises(RehearsalError, match="needs the values of a tensor"):
        asked("masks")
    step = asked("masks", assume=0.25)
    assert made(step, 4 * 10 * WIDTH) >= 3
    with pytest.raises(ConfigError, match=r"between 0 and 1, got 25"):
        asked("masks", assume=25)


@pytest.mark.parametrize("name", ["NAdam", "adamw-amsgrad", "asgd", "rmsprop-momentum-centered"])
def test_state_of_optimizers(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    plan = mmfsdp.plan(model, None, 2)
    step = mmfsdp.rehearse(plan, model, torch.empty(4, 6), optimizer=name, device_type="cpu")
    assert step.static["optimizer state"] == estimate_memory(plan, name).optimizer_state


def test_optimizers_by_reference() -> None:
    model, batch = nn.Linear(6, 5), torch.empty(4, 6)
    sgd = optimizer_from("torch.optim:SGD", {"momentum": 0.9})
    assert mmfsdp.rehearse(None, model, batch, optimizer=sgd).static["optimizer state"] == 4 * 35
    for name, settings, message in (
        ("torch.optim:SDG", {}, "no attribute 'SDG'. Did you mean 'SGD'"),
        ("builtins:True", {}, "is not a class of an optimizer, but True"),
        ("sgd", {"momentun": 1}, r"sgd\(params, momentun=1\) failed: TypeError"),
        ("sgd-momentun", {}, "Did you mean 'sgd-momentum'"),
    ):
        with pytest.raises(ConfigError, match=message):
            optimizer_from(name, settings)(model.parameters())
