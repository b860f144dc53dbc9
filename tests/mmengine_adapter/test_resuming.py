"""Resuming at any step equals never having stopped, with dropout, augmentations and shuffling."""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import multiprocessing
import os
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import LOOPS as TRAIN_LOOPS
from mmengine.runner import FlexibleRunner, IterBasedTrainLoop, Runner
from tests.mmengine_adapter.toy import POLICY, History, ToyData, ToyModel, config, run, strategy, train
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from mmfsdp import model_state_dict
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.checkpoints.latest import find_latest_checkpoint
from mmfsdp_mmengine.hooks.resuming import DistSamplerSeedHook, _Rest

_runs = itertools.count()


@MODELS.register_module(force=True)
class DropoutModel(ToyModel):
    """Drops inputs."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        return super().forward(F.dropout(inputs, 0.3, self.training), labels, mode)


@MODELS.register_module(force=True)
class HalvesModel(DropoutModel):
    """Is trained by two optimizers."""

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        losses = self(**self.data_preprocessor(data, True), mode="loss")
        losses["loss"].backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
            wrapper.zero_grad()
        return losses


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class HalvesConstructor:
    """An optimizer for the blocks and one for the rest."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        pass

    def __call__(self, model: DropoutModel) -> OptimWrapperDict:
        rest = [*model.patch.parameters(), *model.head.parameters()]
        return OptimWrapperDict(
            blocks=OptimWrapper(torch.optim.AdamW(model.blocks.parameters(), lr=0.01)),
            rest=OptimWrapper(torch.optim.SGD(rest, lr=0.1, momentum=0.9), clip_grad={"max_norm": 0.5}),
        )


@DATASETS.register_module(force=True)
class NoisyData(ToyData):
    """Augments with the numbers of every generator, and notes which images training saw."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        shift = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + torch.randn(()) * 0.1
        return {"inputs": item["inputs"] + shift, "labels": item["labels"]}


@DATASETS.register_module(force=True)
class NotingData(NoisyData):
    """Notes each image that is loaded, with a random number."""

    noted: ClassVar[list[tuple[int, float]]] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.noted.append((index, random.random()))
        return super().__getitem__(index)


def loader(world_size: int, workers: int, sampler: str, shuffle: bool = True) -> dict[str, Any]:
    return {
        "batch_size": 8 // world_size,
        "num_workers": workers,
        "dataset": {"type": "NoisyData"},
        "sampler": {"type": sampler, "shuffle": shuffle},
        "collate_fn": {"type": "default_collate"},
    }


LOOPS: dict[str, dict[str, Any]] = {
    "epoch": {"type": "EpochBasedTrainLoop", "max_epochs": 2, "val_interval": 1},
    "iter": {"type": "IterBasedTrainLoop", "max_iters": 8, "val_interval": 3},
}

RATE = {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 6}
MOMENTUM = {"type": "CosineAnnealingMomentum", "eta_min": 0.8, "by_epoch": False, "begin": 1, "T_max": 6}
ONE = {"model": {"type": "DropoutModel"}, "param_scheduler": [RATE, MOMENTUM]}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "float16": {
        **ONE,
        "optim_wrapper": {
            "type": "AmpOptimWrapper",
            "dtype": "float16",
            "loss_scale": {"init_scale": 256.0, "growth_interval": 3},
            "optimizer": {"type": "AdamW", "lr": 0.01},
            "accumulative_counts": 2,
        },
    },
    "two": {
        "model": {"type": "HalvesModel"},
        "optim_wrapper": {"constructor": "HalvesConstructor"},
        "param_scheduler": {"blocks": [RATE], "rest": [MOMENTUM]},
    },
}


def state_of(runner: Any) -> tuple[Any, ...]:
    """What training ends with: weights, momenta, loss scale, and all of the first rank's message hub but times."""
    weights = model_state_dict(runner.model, rank0_only=False)
    scaler = getattr(runner.optim_wrapper, "loss_scaler", None)
    hub = runner.message_hub
    logs, infos = (hub.log_scalars, hub.runtime_info) if runner.rank == 0 else ({}, {})  # resuming gives these to all
    return (
        sum(float(value.double().sum()) for value in weights.values()),
        runner.optim_wrapper.get_momentum(),
        None if scaler is None else scaler.state_dict(),
        {name: [float(x) for x in log.data[0]] for name, log in logs.items() if "time" not in name},
        {name: value for name, value in infos.items() if isinstance(value, int | float | list)},
    )


def resumed_runs(
    rank: int, folder: Path, world_size: int, case: dict[str, Any], steps: list[int]
) -> list[tuple[Any, ...]]:
    """The run that is not interrupted, which saves at every second step, and those that go on from ``steps``."""
    results = []
    # The ranks of tests are daemons, which may not start the workers of a data loader.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    for step in [0, *steps]:
        settings = config(
            folder / ("whole" if step == 0 else f"from{step}"),
            world_size,
            train_dataloader=loader(world_size, case["workers"], case["sampler"]),
            val_dataloader=loader(world_size, 0, "DefaultSampler", shuffle=False),
            train_cfg=LOOPS[case["loop"]],
            randomness={"seed": case["seed"], "diff_rank_seed": True} if case["seed"] else {"seed": None},
            default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 2, "by_epoch": False}},
            strategy=strategy(case["kind"], engine=case["engine"]),
            experiment_name=f"resuming{next(_runs)}",
            **OPTIMIZERS[case["optimizer"]],
        )
        if step:
            settings |= {"load_from": str(folder / "whole" / f"iter_{step}.pth"), "resume": True}
        if case["plain"]:
            wrapper = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY, "engine": case["engine"]}
            settings |= {"model_wrapper_cfg": wrapper, "launcher": "pytorch", "state_dict_cfg": case["kind"]}
            del settings["strategy"]
            runner: Any = Runner.from_cfg(Config(settings))
        else:
            runner = FlexibleRunner.from_cfg(Config(settings))
        random.seed(rank + 10 * step)  # a process that starts again has other numbers
        runner.train()
        history = next(hook for hook in runner.hooks if isinstance(hook, History))
        results.append((history.losses, history.metrics, state_of(runner)))
    return results


def case(
    loop: str, sampler: str, workers: int, engine: str, kind: str, plain: bool, seed: int | None, optimizer: str = "one"
) -> dict[str, Any]:
    return {
        "loop": loop,
        "sampler": sampler,
        "workers": workers,
        "engine": engine,
        "kind": kind,
        "plain": plain,
        "seed": seed,
        "optimizer": optimizer,
    }


CASES = {
    "epoch-0": case("epoch", "DefaultSampler", 0, "fsdp2", "full", False, 5, "float16"),
    "epoch-2-local-fsdp1": case("epoch", "DefaultSampler", 2, "fsdp1", "local", False, None),
    "epoch-plain-sharded": case("epoch", "DefaultSampler", 0, "fsdp2", "sharded", True, None, "two"),
    "iter-sharded": case("iter", "InfiniteSampler", 0, "fsdp2", "sharded", False, None),
    "iter-2-plain": case("iter", "InfiniteSampler", 2, "fsdp1", "full", True, 5),
}


class TestExact:
    @pytest.mark.sample("iter-sharded")
    @pytest.mark.parametrize("name", CASES)
    def test_equals_not_having_stopped(self, tmp_path: Path, name: str) -> None:
        # Steps 2 and 6 are in the middle of epochs, 4 is the last of the first one.
        steps = [2, 4, 6] if name == "epoch-0" else [4] if CASES[name]["loop"] == "iter" else [6]
        for [whole, *resumed] in run_ranks(resumed_runs, 2, tmp_path, 2, CASES[name], steps):
            losses, metrics, state = whole
            assert len(losses) == 8
            if CASES[name]["optimizer"] == "float16":
                assert state[2]["scale"] == 512.0
            # Saved before the validation of their step, which only the loop over epochs makes up for.
            validated = (3, 6, 8) if CASES[name]["loop"] == "iter" else (5, 8)
            for step, found in zip(steps, resumed, strict=True):
                after = metrics[sum(at <= step for at in validated) :]
                assert found == (losses[step:], after, state), step


def by_iteration(**changes: Any) -> dict[str, Any]:
    checkpoint = {"type": "CheckpointHook", "interval": 2, "by_epoch": False}
    return {"strategy": strategy("local"), "default_hooks": {"checkpoint": checkpoint}, **changes}


@HOOKS.register_module(force=True)
class Draws(Hook):
    """Draws random numbers in each iteration, before anything is saved."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        torch.rand(3)


def finish_twice(rank: int, folder: Path, kind: str) -> list[list[float]]:
    found = []
    for _ in range(2):
        hooks = [{"type": "History"}, {"type": "Draws"}]
        loop = {"type": "IterBasedTrainLoop", "max_iters": 4}
        settings = by_iteration(strategy=strategy(kind), resume=True, train_cfg=loop, custom_hooks=hooks)
        run(config(folder, 2, **settings))
        numbers = [random.gauss(0, 1), np.random.rand(), *torch.rand(4).tolist()]
        found.append(numbers)
        if rank == 0 and kind == "full":
            store_as_before(folder / "iter_4.pth")
        torch.distributed.barrier()
    return found


def store_as_before(path: Path) -> None:
    """Store random states in the layout of earlier versions: rows of packed numbers that do not say how long they are.

    A file that has them already is left alone.
    """
    content = torch.load(path, weights_only=False)
    if (rows := content["progress"].pop("random", None)) is None:
        return
    table = []
    for row in rows:
        state = json.loads(bytes(row.tolist())[8:].rstrip(b"\0"))
        _, words, gauss = state["python"]
        _, keys, *rest = state["numpy"]
        packed = struct.pack("<625I?d", *words, gauss is not None, gauss or 0.0)
        packed += struct.pack("<624Iqqd", *keys, *rest) + base64.b64decode(state["torch"])
        table.append(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    content["progress"]["random_states"] = torch.stack(table)
    torch.save(content, path)


@pytest.mark.parametrize("kind", ["local", "full"])
def test_a_finished_run_that_is_started_again_has_the_random_numbers_of_its_end(tmp_path: Path, kind: str) -> None:
    for first, second in run_ranks(finish_twice, 2, tmp_path, kind):
        assert first == second


def unseeded(dataset: Any, seed: int | None) -> RandomSampler:
    return RandomSampler(dataset)


def train_noisily(rank: int, folder: Path, world_size: int, changes: dict[str, Any]) -> Any:
    """Train with what this module registers, and with a sampler of torch."""
    DATA_SAMPLERS.register_module("unseeded", module=unseeded, force=True)
    return train(rank, folder, world_size, changes)


class TestOtherWorldSize:
    @pytest.mark.exhaustive
    def test_in_the_middle_of_an_epoch(self, tmp_path: Path) -> None:
        whole = run_ranks(train, 2, tmp_path / "2", 2, by_iteration())[0]
        # From two ranks to one, and from one to two: checkpoints in the middle of either epoch.
        for world_size, before, step in ((1, "2", 2), (2, "1", 6)):
            saved = tmp_path / before / f"iter_{step}.pth"
            changes = by_iteration(load_from=str(saved), resume=True, log_level="INFO")
            folder = tmp_path / ("1" if world_size == 1 else "again")
            resumed = run_ranks(train, world_size, folder, world_size, changes)[0]
            assert resumed["losses"] == pytest.approx(whole["losses"][step:], rel=1e-5)
        [log] = (tmp_path / "1").glob("*/*.log")
        assert log.read_text().count("saved by 2 ranks and is resumed by 1: everything is restored except the") == 1

    def test_what_is_not_exact_is_reported(self, tmp_path: Path) -> None:
        """At the first save: a sampler without a seed. At the restart: batches of another size from such a sampler."""
        data = {**loader(1, 0, "unseeded"), "sampler": {"type": "unseeded"}}
        [first, second] = (tmp_path / "first", tmp_path / "second")
        run_ranks(train_noisily, 1, first, 1, by_iteration(train_dataloader=data, log_level="INFO"))
        [log] = first.glob("*/*.log")
        assert (
            log.read_text().count("The order in which a RandomSampler gives samples does not follow from a seed") == 1
        )
        saved = {"load_from": str(first / "iter_2.pth"), "resume": True, "log_level": "INFO"}
        run_ranks(train_noisily, 1, second, 1, by_iteration(train_dataloader={**data, "batch_size": 6}, **saved))
        [log] = second.glob("*/*.log")
        assert "was saved after 16 samples of its epoch. Training goes on after 2 batches of 6" in log.read_text()


def test_workers_that_stay_are_reported_once_and_samples_are_counted() -> None:
    data, said = ToyData(), list[str]()
    loader = DataLoader(data, 4, sampler=DefaultSampler(data, seed=1), num_workers=1, persistent_workers=True)
    loop = SimpleNamespace(dataloader=loader, dataloader_iterator=None)
    logger = SimpleNamespace(warning=said.append)
    runner: Any = SimpleNamespace(train_loop=loop, world_size=1, logger=logger, epoch=0, iter=5)
    hook, found = DistSamplerSeedHook(), {"progress": dict[str, Any]()}
    hook.before_train(runner)  # resumed from what stock MMEngine saved, which does not tell the position
    hook.before_train_epoch(runner)
    for _ in range(2):
        hook.before_save_checkpoint(runner, found)
    [text] = said
    assert "random augmentations differ" in text
    assert (found["progress"]["counted_at"], found["progress"]["seen"]) == (5, 20)


@pytest.mark.parametrize("round_up", [True, False])
def test_a_whole_epoch_is_divided_as_mmengine_divides_it(round_up: bool) -> None:
    for length, ranks in itertools.product([1, 3, 7, 8], [1, 2, 3, 4]):
        for rank in range(ranks):
            sampler = DefaultSampler(range(length), shuffle=True, seed=3, round_up=round_up)
            sampler.rank, sampler.world_size = rank, ranks
            sampler.num_samples = -(-(length if round_up else length - rank) // ranks)
            sampler.total_size = sampler.num_samples * ranks if round_up else length
            batches = BatchSampler(sampler, 2, drop_last=False)
            assert [*_Rest(batches, 0)] == [*sampler]
            assert batches.sampler is sampler


@TRAIN_LOOPS.register_module(force=True)
class WithoutSkipping(IterBasedTrainLoop):
    """Goes on with the data's beginning after a resume, as a loop of onedl-mmengine does when told to."""

    def __init__(self, *args: Any, fast_forward_on_resume: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fast_forward_on_resume = fast_forward_on_resume

    def run(self) -> Any:
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        if not self.fast_forward_on_resume:
            for _ in range(self._iter):
                next(self.dataloader_iterator)
        while self._iter < self._max_iters:
            self.runner.model.train()
            self.run_iter(next(self.dataloader_iterator))
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")
        return self.runner.model


OF_ONEDL = "fast_forward_on_resume" in inspect.signature(IterBasedTrainLoop).parameters
LOOP = "IterBasedTrainLoop" if OF_ONEDL else "WithoutSkipping"


def seen(rank: int, folder: Path, fast_forward: bool) -> list[list[tuple[int, float]]]:
    """The images that a whole run of four steps and one resumed after the second loaded, each with a random number."""
    runs = []
    for resumed in (False, True):
        changes = {
            "train_dataloader": {**loader(1, 0, "InfiniteSampler"), "dataset": {"type": "NotingData"}},
            "train_cfg": {"type": LOOP, "max_iters": 4, "fast_forward_on_resume": fast_forward},
            **({"load_from": str(folder / "iter_2.pth"), "resume": True} if resumed else {}),
        }
        NotingData.noted = []
        train(rank, folder, 1, by_iteration(val_dataloader=None, val_cfg=None, val_evaluator=None, **changes))
        runs.append(NotingData.noted)
    return runs


class TestLoopThatDoesNotSkip:
    def test_data_from_the_beginning_and_random_numbers_as_saved(self, tmp_path: Path) -> None:
        [[whole, resumed]] = run_ranks(seen, 1, tmp_path, True)
        assert [index for index, _ in resumed] == [index for index, _ in whole[:16]]
        assert [number for _, number in resumed] == [number for _, number in whole[16:]]

    def test_by_default_it_skips(self, tmp_path: Path) -> None:
        [[whole, resumed]] = run_ranks(seen, 1, tmp_path, False)
        assert [index for index, _ in resumed] == [index for index, _ in whole]
        assert resumed[16:] == whole[16:]


class TestStockFull:
    @pytest.mark.exhaustive
    def test_optimizer_state_by_names(self, tmp_path: Path) -> None:
        """As MMEngine's own FSDPStrategy saves it: torch's ``FSDP.optim_state_dict``, and nothing of how far it was."""
        changes = {"strategy": strategy("full")}
        whole = run_ranks(train, 2, tmp_path, 2, changes)[0]
        content = torch.load(tmp_path / "epoch_1.pth", weights_only=False)
        del content["progress"]
        optimizer = content["optimizer"]
        [group] = optimizer["param_groups"]
        names = dict(zip(group["params"], group.pop("param_names"), strict=True))
        group["params"] = [*names.values()]
        optimizer["state"] = {names[number]: state for number, state in optimizer["state"].items()}
        torch.save(content, tmp_path / "stock.pth")
        changes |= {"load_from": str(tmp_path / "stock.pth"), "resume": True}
        resumed = run_ranks(train, 2, tmp_path / "again", 2, changes)[0]
        assert resumed["losses"] == whole["losses"][4:]


class TestAutoResume:
    """``resume=True`` without ``load_from``."""

    def test_goes_on_from_the_newest_complete_checkpoint(self, tmp_path: Path) -> None:
        [whole, _] = run_ranks(train, 2, tmp_path, 2, by_iteration())
        last = tmp_path / "last_checkpoint"
        assert last.read_text() == str(tmp_path / "iter_8.pth")
        # As a machine leaves it that went down while MMEngine's own strategy saved.
        (tmp_path / "iter_8.pth" / "rank1.pth").unlink()
        os.truncate(tmp_path / "iter_6.pth" / "rank0.pth", 2000)
        torch.save({"state_dict": {}, "meta": {}}, tmp_path / "best.pth")
        os.utime(tmp_path / "iter_2.pth", (2**31, 2**31))  # the clocks of hosts differ
        resumed = run_ranks(train, 2, tmp_path, 2, by_iteration(resume=True))
        assert [result["losses"] for result in resumed] == [whole["losses"][4:]] * 2
        logs = "".join(path.read_text() for path in tmp_path.glob("*/*.log"))
        assert "iter_4.pth, the newest complete one." in logs
        assert "last_checkpoint names " in logs

    def test_finds_it_without_a_note_and_nothing_where_there_is_nothing(self, tmp_path: Path) -> None:
        assert find_latest_checkpoint(str(tmp_path)) is None
        torch.save({"state_dict": {"a": torch.ones(1)}, "meta": {}, "optimizer": {}}, tmp_path / "epoch_1.pth")
        torch.save({"a": torch.ones(1)}, tmp_path / "weights.pth")
        assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "epoch_1.pth")
        (tmp_path / "last_checkpoint").write_text(str(tmp_path / "epoch_2.pth"))
        assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "epoch_1.pth")
        for name, done in (("iter_5.pth", 5), ("epoch_2.pth", 8), ("iter_3.pth", 3)):
            torch.save({"state_dict": {"a": torch.ones(1)}, "meta": {"iter": done}, "optimizer": {}}, tmp_path / name)
        (tmp_path / "last_checkpoint").unlink()
        assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "epoch_2.pth")
        # What is named is taken at its word if it can be read: resuming then says what it lacks.
        (tmp_path / "last_checkpoint").write_text(str(tmp_path / "weights.pth"))
        assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "weights.pth")
