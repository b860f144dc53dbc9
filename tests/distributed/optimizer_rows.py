"""Runs what the table of optimizers in docs/explanation/optimizers.md says about each of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.errors import StateDictError
from mmfsdp.testing import run_ranks

__all__ = ["WHOLE", "rows", "words_of"]

WHOLE: dict[str, Any] = {"sharding": {"ignored_parameters": ["**"]}}
"""Settings that keep every parameter whole."""

_PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "optimizers.md"
_KINDS = ("sharded", "local", "full")
_STEPS, _MORE = 3, 2

_SETTINGS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"lr": 0.1, "momentum": 0.9},
    "torch.optim.RMSprop": {"lr": 1e-3},
    "torch.optim.Rprop": {"lr": 1e-3},
    "torch.optim.LBFGS": {"lr": 0.1, "max_iter": 2},
    "lion_pytorch.Lion": {"lr": 1e-4},
    "transformers.optimization.Adafactor": {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    "pytorch_optimizer.CAME": {"lr": 1e-3},
    "pytorch_optimizer.AdEMAMix": {"lr": 1e-3},
    "pytorch_optimizer.Shampoo": {"lr": 1e-2, "preconditioning_compute_steps": 1},
}

_GROUP_SETTINGS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer.GaLore": {"rank": 8, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


def rows(packages: str) -> dict[str, tuple[str, str]]:
    """Return what the table says of optimizers of some packages: the words for training and for saving."""
    found = re.findall(rf"^\| `((?:{packages})\.[\w.]+)` \| (\w+) \| (\w*) ?\|", _PAGE.read_text(), re.MULTILINE)
    return {name: (trains, saves) for name, trains, saves in found}


def words_of(name: str, folder: Path, config: dict[str, Any] | None = None) -> tuple[str, str]:
    """Train, save and resume with an optimizer, and return the words that the table should have."""
    [wanted] = run_ranks(_alone, 1, name)
    trained = run_ranks(_train, 2, name, str(folder), config)[0]
    if isinstance(trained, str):
        return trained, ""
    weights, saved = trained
    trains = _word(_difference(weights, wanted[0]))
    if saved:
        return trains, saved
    differences = [_difference(found, wanted[1]) for found in run_ranks(_resume, 3, name, str(folder), config)[0]]
    # Compressed state is rounded once more.
    bound = 2e-2 if name.startswith("torchao") or trains == "nearly" else 1e-4
    return trains, "yes" if max(differences) < bound else f"off by {max(differences):.0e}"


def _word(difference: float) -> str:
    return "yes" if difference < 1e-4 else "nearly" if difference < 1e-2 else f"off by {difference:.0e}"


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    torch.compiler.set_stance("force_eager")  # torchao compiles its step for each shape
    module, _, kind = name.rpartition(".")
    params = [param for param in model.parameters() if param.dim() == 2 or kind != "Muon"]
    matrices = [param for param in params if param.dim() == 2]
    groups = [{"params": matrices, **_GROUP_SETTINGS[name]}] if name in _GROUP_SETTINGS else params
    made: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(
        groups, **_SETTINGS.get(name, {"lr": 1e-2})
    )
    if module == "schedulefree":
        made.train()  # type: ignore[attr-defined]
    return made


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(first, first + count):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 12, 64, generator=generator).chunk(ranks, 1)[rank]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _alone(rank: int, name: str) -> list[dict[str, Any]]:
    model = Net()
    optimizer, found = _optimizer(name, model), []
    for first, count in ((0, _STEPS), (_STEPS, _MORE)):
        _steps(model, optimizer, first, count)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    return found


def _train(rank: int, name: str, folder: str, config: dict[str, Any] | None) -> Any:
    model = mmfsdp.shard(Net(), config)
    optimizer = _optimizer(name, model)
    try:
        _steps(model, optimizer, 0, _STEPS)
    except RuntimeError as error:
        if "placement" not in str(error) and "DTensor" not in str(error):
            raise
        return "fails"
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    for kind in _KINDS:
        try:
            mmfsdp.save_checkpoint(_path(folder, kind), model, optimizer, kind=kind)  # type: ignore[arg-type]
        except StateDictError:
            return weights, "refused"
    return weights, ""


def _resume(rank: int, name: str, folder: str, config: dict[str, Any] | None) -> list[dict[str, Any]]:
    found = []
    for kind in _KINDS:
        model = mmfsdp.shard(Net(), config)
        optimizer = _optimizer(name, model)
        mmfsdp.load_checkpoint(_path(folder, kind), model, optimizer)
        _steps(model, optimizer, _STEPS, _MORE)
        found.append(mmfsdp.model_state_dict(model, rank0_only=False))
    return found


def _path(folder: str, kind: str) -> str:
    return f"{folder}/{kind}{'.pth' if kind == 'full' else ''}"


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    return max(((found[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted)
