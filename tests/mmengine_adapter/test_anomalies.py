"""``detect_anomalous_params``: parameters that no loss reaches are logged, by the model's own names."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.nn as nn
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.model.utils import detect_anomalous_params
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.registry import MODEL_WRAPPERS


class Leaf(nn.Module):
    """A linear layer that is used, one that is not, and one whose weight alone is."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.partly = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x)) @ self.partly.weight.t()


@MODELS.register_module(force=True)
class Partial(BaseModel):
    """Has parameters that the loss does not reach: in units, in the root, and in a unit that is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.idle = Leaf()
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        return {"loss": self.head(self.leaf(self.leaf(inputs))).sum()}


@MODELS.register_module(force=True)
class PartialOwnStep(Partial):
    """Runs a step of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(**data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        MMLogger.get_current_instance().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "computational graph" in record.getMessage():
            self.lines.append(record.getMessage())


def logged(rank: int) -> dict[tuple[str, str], list[list[str]]]:
    return {(name, cls): log_of(cls, WRAPPERS[name]) for name in WRAPPERS for cls in ("Partial", "PartialOwnStep")}


def log_of(cls: str, wrapper: dict[str, Any]) -> list[list[str]]:
    torch.manual_seed(0)
    alone = MODELS.build({"type": cls})
    settings = {**wrapper, "detect_anomalous_params": True}
    model = MODEL_WRAPPERS.build(settings, default_args={"module": copy.deepcopy(alone)})
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        handler = Lines()
        model.train_step({"inputs": torch.ones(2, 4)}, optim)
        MMLogger.get_current_instance().removeHandler(handler)
        found.append(handler.lines)
    handler = Lines()
    detect_anomalous_params(alone(torch.ones(2, 4))["loss"], alone)
    MMLogger.get_current_instance().removeHandler(handler)
    return [*found, handler.lines]


POLICY = {"type": "ModuleWrapPolicy", "module_classes": ["Leaf"]}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {"type": "MMDistributedDataParallel", "find_unused_parameters": True, "device_ids": [0]},
    "fsdp2": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY},
    "replicate": {"type": "MMFullyShardedDataParallel", "sharding_strategy": "NO_SHARD"},
    "checkpointed": {
        "type": "MMFullyShardedDataParallel",
        "auto_wrap_policy": POLICY,
        "activation_checkpointing": "full",
    },
    "ignored": {"type": "MMFullyShardedDataParallel", "ignored_parameters": ["spare", "leaf.unused.weight"]},
    "fsdp1": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY, "engine": "fsdp1"},
}


def test_are_logged_as_mmengine_logs_them_of_the_unsharded_model() -> None:
    for found in run_ranks(logged, 2):
        for case, (first, second, expected) in found.items():
            assert len(expected) == 11
            assert sorted(first) == sorted(second) == sorted(expected), case
