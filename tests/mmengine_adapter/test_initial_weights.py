"""A model's own initialisation, ``init_cfg`` included, gives the values that it gives unsharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.model import BaseModel, BaseModule, ModuleList
from mmengine.registry import MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.toy import POLICY, UNSHARDED, config, runner_of

from mmfsdp import model_state_dict
from mmfsdp.testing import run_ranks

FLAT = [{"type": "Kaiming", "layer": "Conv2d"}, {"type": "Constant", "val": 0.5, "layer": "LayerNorm"}]
BLOCK = [{"type": "TruncNormal", "layer": "Linear", "std": 0.02, "override": {"type": "Xavier", "name": "second"}}]


class InitBlock(BaseModule):
    """Initialises by its own init_cfg, part of it by an override."""

    def __init__(self, width: int) -> None:
        super().__init__(init_cfg=BLOCK)
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x)).relu())


class InitNeck(BaseModule):
    """Has an init_weights of its own, which draws random numbers and reads a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = ModuleList([InitBlock(width), InitBlock(width)])
        self.token = nn.Parameter(torch.zeros(width))
        self.register_buffer("scale", torch.tensor(3.0))

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.normal_(self.token, std=float(self.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.token


@MODELS.register_module(force=True)
class InitModel(BaseModel):
    """Modules within modules, each with an initialisation of its own; one has none, and is as it was built."""

    def __init__(self, pretrained: str | None = None) -> None:
        init_cfg = [*FLAT, {"type": "Pretrained", "checkpoint": pretrained}] if pretrained else FLAT
        super().__init__(data_preprocessor={"type": "ToyPreprocessor"}, init_cfg=init_cfg)
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.neck = InitNeck(8)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        logits = self.head(self.neck(self.patch(inputs).flatten(2).mean(2)))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


WRAPPER = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": {**POLICY, "module_classes": ["InitBlock"]}}


def trained(folder: Path, world_size: int, **changes: Any) -> Any:
    """A runner that has made a step with a learning rate of 0; the plain one, if no strategy is given."""
    settings = config(folder, world_size, **{"model": {"type": "InitModel"}, **changes})
    for name in ("param_scheduler", "default_hooks", "custom_hooks", "val_dataloader", "val_evaluator", "val_cfg"):
        settings[name] = None
    settings["optim_wrapper"] = {"optimizer": {"type": "SGD", "lr": 0.0}}
    settings["train_cfg"] = {"by_epoch": False, "max_iters": 1}
    if "launcher" in changes:
        del settings["strategy"]
        runner = Runner.from_cfg(Config({**settings, "experiment_name": f"initial {folder.name}"}))
    else:
        runner = runner_of(settings)
    runner.train()
    return runner


def stock(rank: int, folder: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    runner = trained(folder, 1, **changes)
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def sharded(rank: int, folder: Path, pretrained: str) -> dict[str, dict[str, torch.Tensor]]:
    """The weights that each way to shard begins with."""
    found = {}
    for engine in ("fsdp2", "fsdp1"):
        wrapper = {**WRAPPER, "engine": engine}
        strategy = {"type": "FSDPStrategy", "model_wrapper": wrapper}
        runs: dict[str, dict[str, Any]] = {
            "strategy": {"strategy": strategy},
            "plain": {"launcher": "pytorch", "model_wrapper_cfg": wrapper},
            "pretrained": {"strategy": strategy, "model": {"type": "InitModel", "pretrained": pretrained}},
            "skipped": {"strategy": {**strategy, "skip_init_weights": True}, "load_from": pretrained},
        }
        for name, changes in runs.items() if engine == "fsdp2" else [("strategy", runs["strategy"])]:
            runner = trained(folder / f"{engine} {name}", 2, **changes)
            found[f"{engine} {name}"] = model_state_dict(runner.model, "full", rank0_only=False)
    return found


def test_equals_the_unsharded_model_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrained = {name: torch.randn_like(value) for name, value in InitModel().state_dict().items()}
    torch.save(pretrained, tmp_path / "pretrained.pth")
    path = str(tmp_path / "pretrained.pth")
    [initial] = run_ranks(stock, 1, tmp_path / "initial", {"strategy": UNSHARDED})
    [plain] = run_ranks(stock, 1, tmp_path / "plain", {"launcher": "none"})
    [loaded] = run_ranks(
        stock, 1, tmp_path / "loaded", {"strategy": UNSHARDED, "model": {"type": "InitModel", "pretrained": path}}
    )
    # So that equal means something: each way to initialise has left its mark.
    assert initial["neck.token"].std() > 1
    assert (initial["neck.blocks.0.norm.weight"] == 0.5).all()
    assert initial["neck.blocks.0.first.weight"].abs().max() < 0.1 < initial["neck.blocks.0.second.weight"].abs().max()
    assert torch.equal(loaded["head.weight"], pretrained["head.weight"])
    assert not torch.equal(initial["head.weight"], pretrained["head.weight"])
    for found in run_ranks(sharded, 2, tmp_path, path):
        for run, state in found.items():
            kind = run.split()[-1]
            expected = {"strategy": initial, "plain": plain, "pretrained": loaded, "skipped": pretrained}[kind]
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert torch.equal(value, expected[name]), (run, name)
