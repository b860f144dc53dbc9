"""Settings of the runners that reach the strategy: auto_scale_lr and compile, and validation before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.toy import POLICY, History, ToyModel, config, runner_of

from mmfsdp.testing import run_ranks

SCALE = {"auto_scale_lr": {"enable": True, "base_batch_size": 32}}
ONCE = {"by_epoch": True, "max_epochs": 1, "val_interval": 1}
SHALLOW = {"type": "ToyModel", "depth": 1}
UNVALIDATED = {"val_dataloader": None, "val_evaluator": None, "val_cfg": None}
graphs: list[list[str]] = []


def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend of torch.compile that notes what it is given, and runs it as it is."""
    graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward


@MODELS.register_module(force=True)
class OwnStep(ToyModel):
    """Has a train_step of its own, which does what MMEngine's does."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        return super().train_step(data, optim_wrapper)


def plain_run(folder: Path, world_size: int, **changes: Any) -> Runner:
    settings = config(folder, world_size, **{"train_cfg": ONCE, "model": SHALLOW, **changes})
    del settings["strategy"]
    if world_size > 1:
        wrapper = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
        settings |= {"launcher": "pytorch", "model_wrapper_cfg": wrapper}
    runner = Runner.from_cfg(Config({**settings, "experiment_name": folder.name}))
    runner.train()
    return runner


def history_of(runner: Any) -> History:
    return next(hook for hook in runner.hooks if isinstance(hook, History))


def stock(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    runner = plain_run(folder / "stock_scaled", 1, **SCALE)
    return history_of(runner).losses, runner.optim_wrapper.get_lr()["lr"]


def sharded(rank: int, folder: Path) -> dict[str, Any]:
    """Runs with settings, by name; and the rate that each ends with."""
    found: dict[str, Any] = {}
    compiled = {"compile": {"backend": noting}, **UNVALIDATED}  # validation would be compiled again
    own = {**compiled, "model": {**SHALLOW, "type": "OwnStep"}}
    for name, changes in {"as it is": {}, "scaled": SCALE, "compiled": compiled, "own step": own}.items():
        for kind in ("flexible", "plain"):
            graphs.clear()
            torch.compiler.reset()
            if kind == "plain":
                runner: Any = plain_run(folder / f"plain_{name}", 2, **changes)
            else:
                runner = runner_of(
                    config(folder / f"flexible_{name}", 2, **{"train_cfg": ONCE, "model": SHALLOW, **changes})
                )
                runner.train()
            seen = "".join(target for graph in graphs for target in graph)
            history = history_of(runner)
            found[f"{kind} {name}"] = (history.losses, runner.optim_wrapper.get_lr()["lr"], "linear" in seen)
            if (kind, name) != ("flexible", "as it is"):
                continue
            validating = runner_of(config(folder / "validating", 2, train_cfg=ONCE, model=SHALLOW))
            first = validating.val()
            assert first == validating.val()
            validating.train()
            after = history_of(validating)
            found["after validation"] = (after.losses, after.metrics == [first, first, *history.metrics])
    return found


@pytest.mark.exhaustive
def test_they_have_their_effect(tmp_path: Path) -> None:
    [(losses, rate)] = run_ranks(stock, 1, tmp_path)
    for found in run_ranks(sharded, 2, tmp_path):
        base, base_rate, _ = found["flexible as it is"]
        assert found["plain as it is"][0] == pytest.approx(base, rel=1e-5)
        assert found["after validation"] == (base, True)
        assert rate == [base_rate[0] / 4]
        for kind in ("flexible", "plain"):
            scaled, its_rate, _ = found[f"{kind} scaled"]
            assert its_rate == rate
            assert scaled == pytest.approx(losses, rel=1e-5)
            assert scaled != pytest.approx(base, rel=1e-3)
            for name in ("compiled", "own step"):
                compiled, _, were = found[f"{kind} {name}"]
                assert were
                assert compiled == pytest.approx(base, rel=1e-5)
