"""EMAHook: averages of a sharded model are those of stock MMEngine's hook on the unsharded one, and cost one shard."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mmengine.hooks
import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.hooks import ema_hook
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import HOOKS, METRICS, MODELS
from mmengine.runner import Runner, load_state_dict
from tests.forked_scripts import run_script
from tests.mmengine_adapter.toy import POLICY, UNSHARDED, Accuracy, History, ToyModel, config, run, runner_of, strategy

from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.errors import ConfigError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import EMAHook, MMFullyShardedDataParallel
from mmfsdp_mmengine.checkpoints.live_content import safe_globals

_runs = itertools.count()


class StockEMAHook(ema_hook.EMAHook):
    """MMEngine's own hook; as an object it would stand for ours."""


@MODELS.register_module(force=True)
class Counting(ToyModel):
    """Has buffers that training changes, a frozen parameter, a tied one, and predictions with scores."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__(scale=True)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.blocks[1].fc1.weight = self.blocks[0].fc1.weight
        self.patch.bias.requires_grad_(not frozen)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        if mode == "loss":
            self.seen += 1.5
            self.calls += 1
            return super().forward(inputs, labels, mode)
        logits = super().forward(inputs, labels)
        return [
            {"label": label, "pred": logit.argmax(), "score": logit.square().sum() + self.seen.sum()}
            for label, logit in zip(labels, logits, strict=True)
        ]


@MODELS.register_module(force=True)
class WarmingEMA(ExponentialMovingAverage):
    """As those of mmdet and mmyolo: a momentum that falls exponentially, and an argument of its own."""

    def __init__(self, model: nn.Module, momentum: float = 0.1, gamma: int = 4, **kwargs: Any) -> None:
        super().__init__(model=model, momentum=momentum, **kwargs)
        self.gamma = gamma

    def avg_func(self, averaged_param: torch.Tensor, source_param: torch.Tensor, steps: int) -> None:
        momentum = (1 - self.momentum) * math.exp(-float(1 + steps) / self.gamma) + self.momentum
        averaged_param.mul_(1 - momentum).add_(source_param, alpha=momentum)


@METRICS.register_module(force=True)
class Score(Accuracy):
    """Mean score, which no average of weights can miss."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample["score"]) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"score": sum(results) / len(results)}


CASES: dict[str, dict[str, Any]] = {
    "ema": {"ema_type": "ExponentialMovingAverage", "momentum": 0.2, "update_buffers": True},
    "swa": {"ema_type": "StochasticWeightAverage", "interval": 2},
    "annealing": {"ema_type": "MomentumAnnealingEMA", "momentum": 0.1, "gamma": 3, "begin_iter": 3},
    "warming": {"ema_type": "WarmingEMA", "update_buffers": True, "begin_epoch": 2},
    "flat": {"ema_type": "ExponentialMovingAverage", "momentum": 0.1},
}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicate": {"sharding_strategy": "NO_SHARD"},
    "fsdp1": {"engine": "fsdp1"},
    "flat": {"use_orig_params": False},
}


def settings(folder: Path, world_size: int, hook: dict[str, Any], **changes: Any) -> dict[str, Any]:
    flat = changes.get("strategy", {}).get("model_wrapper", {}).get("use_orig_params") is False
    return config(
        folder,
        world_size,
        **{
            "model": {"type": "Counting", "frozen": not flat},  # a flat parameter is trained or frozen as a whole
            "val_evaluator": {"type": "Score"},
            "custom_hooks": [{"type": "History"}, {"priority": "ABOVE_NORMAL", **hook}],
            **changes,
        },
    )


def trained(folder: Path, world_size: int, hook: dict[str, Any], **changes: Any) -> dict[str, Any]:
    with torch.serialization.safe_globals(safe_globals()):
        history = run(settings(folder, world_size, hook, **changes))
    return {"losses": history.losses, "metrics": history.metrics}


def plain_runner(settings: dict[str, Any]) -> Runner:
    """The older runner with what the strategy says."""
    strategy = settings.pop("strategy")
    name = f"plain-ema{next(_runs)}"
    if strategy["type"] == "FSDPStrategy":
        settings |= {"launcher": "pytorch", "state_dict_cfg": strategy["state_dict_cfg"]}
        settings["model_wrapper_cfg"] = {"type": "MMFullyShardedDataParallel", **strategy["model_wrapper"]}
    return Runner.from_cfg(Config({**settings, "experiment_name": name}))


def trained_plainly(folder: Path, world_size: int, hook: dict[str, Any], **changes: Any) -> dict[str, Any]:
    runner = plain_runner(settings(folder, world_size, hook, **changes))
    runner.train()
    history = next(hook for hook in runner.hooks if isinstance(hook, History))
    return {"losses": history.losses, "metrics": history.metrics}


def stock(rank: int, folder: Path) -> dict[str, Any]:
    return {
        name: trained(
            folder / name,
            1,
            {"type": StockEMAHook, **case},
            strategy=UNSHARDED,
            model={"type": "Counting", "frozen": name != "flat"},
        )
        for name, case in CASES.items()
    }


def ours(rank: int, folder: Path, cases: list[str], engine: str, kind: str = "full") -> dict[str, Any]:
    made = strategy(kind, **ENGINES[engine])
    return {name: trained(folder / name, 2, {"type": "EMAHook", **CASES[name]}, strategy=made) for name in cases}


def load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(safe_globals()):
        return torch.load(path, weights_only=True)


def check_close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for part in ("state_dict", "ema_state_dict"):
        assert mine[part].keys() == theirs[part].keys()
        for name, value in theirs[part].items():
            torch.testing.assert_close(mine[part][name], value, rtol=1e-4, atol=1e-5, msg=f"{part} {name}")
    assert not torch.equal(mine["state_dict"]["head.weight"], mine["ema_state_dict"]["module.head.weight"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stock")
    [results] = run_ranks(stock, 1, folder)
    return folder, results


class TestParity:
    """Losses, metrics of the averages and both sets of saved weights, against stock MMEngine in a single process."""

    @pytest.mark.sample("replicate", "flat")
    @pytest.mark.parametrize(
        ("engine", "cases"),
        [
            ("fsdp2", ["ema", "swa", "annealing", "warming"]),
            ("replicate", ["ema"]),
            ("fsdp1", ["ema", "annealing"]),
            ("flat", ["flat"]),
        ],
        ids=["fsdp2", "replicate", "fsdp1", "flat"],
    )
    def test_averages(self, tmp_path: Path, reference: Any, engine: str, cases: list[str]) -> None:
        folder, expected = reference
        results = run_ranks(ours, 2, tmp_path, cases, engine)
        assert results[0] == results[1]
        for name in cases:
            assert results[0][name]["losses"] == pytest.approx(expected[name]["losses"], rel=1e-4)
            for mine, theirs in zip(results[0][name]["metrics"], expected[name]["metrics"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-4)
            check_close(load(tmp_path / name / "epoch_2.pth"), load(folder / name / "epoch_2.pth"))


def resumed(rank: int, folder: Path, engine: str, kind: str, other: str) -> dict[str, Any]:
    hook = {"type": "EMAHook", **CASES["ema"], "strict_load": True}
    train = trained_plainly if engine.startswith("plain ") else trained
    engine = engine.removeprefix("plain ")
    whole = train(folder / "whole", 2, hook, strategy=strategy(kind, **ENGINES[engine]))
    changes = {"load_from": str(folder / "whole" / "epoch_1.pth"), "resume": True}
    again = train(folder / "again", 2, hook, **changes, strategy=strategy(other, **ENGINES[engine]))
    return {"whole": whole, "again": again}


def tensors(path: Path, part: str) -> dict[str, Any]:
    """A part of a checkpoint of any kind, whole."""
    if path.is_dir():
        convert(path, path.with_suffix(".all.pth"), keep="all", overwrite=True)
        path = path.with_suffix(".all.pth")
    return load(path)[part]


class TestResume:
    @pytest.mark.sample("fsdp2-sharded-sharded", "replicate-local-local")
    @pytest.mark.parametrize(
        ("engine", "kind", "other"),
        [
            ("fsdp2", "sharded", "sharded"),
            ("replicate", "local", "local"),
            ("fsdp1", "sharded", "local"),
            ("flat", "full", "local"),
            ("plain fsdp2", "local", "full"),
        ],
    )
    def test_equals_not_having_stopped(
        self, tmp_path: Path, reference: Any, engine: str, kind: str, other: str
    ) -> None:
        [found, _] = run_ranks(resumed, 2, tmp_path, engine, kind, other)
        if engine != "flat":  # whose frozen parameter is not
            assert found["whole"]["losses"] == pytest.approx(reference[1]["ema"]["losses"], rel=1e-4)
            assert found["whole"]["metrics"][1] == pytest.approx(reference[1]["ema"]["metrics"][1], rel=1e-4)
        assert found["again"]["losses"] == found["whole"]["losses"][4:]
        assert found["again"]["metrics"] == found["whole"]["metrics"][1:]
        for part in ("state_dict", "ema_state_dict"):
            whole, again = (tensors(tmp_path / run / "epoch_2.pth", part) for run in ("whole", "again"))
            assert whole.keys() == again.keys()
            for name, value in whole.items():
                assert torch.equal(value, again[name]), name
        assert again["steps"] == 8

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("engine", ["fsdp2", "flat"])
    def test_strict_load_as_stock(self, tmp_path: Path, reference: Any, engine: str) -> None:
        folder, _ = reference
        [expected] = run_ranks(strictly, 1, tmp_path / "stock", folder, StockEMAHook, UNSHARDED)
        made = strategy(**ENGINES[engine])
        for found in run_ranks(strictly, 2, tmp_path / "ours", folder, EMAHook, made):
            for case, (error, is_unchanged) in found.items():
                assert bool(error) == bool(expected[case][0]), case
                if error:
                    assert is_unchanged, case
                    assert "StateDictError: EMAHook(strict_load=True): this checkpoint does not match" in error
                    assert ("1 missing: head.bias; 1 unexpected: tail" in error) == ("key" in case)
                    assert ("1 missing: steps" in error) == ("steps" in case)
        assert {case for case, (error, _) in expected.items() if error} == {
            "key True False",
            "key True True",
            "steps True True",
        }

    @pytest.mark.exhaustive
    def test_from_ddp_s_and_stock_s_checkpoints_and_without_averages(self, tmp_path: Path, reference: Any) -> None:
        folder, _ = reference
        for found in run_ranks(others, 2, tmp_path, folder):
            assert found["ddp"] == pytest.approx(found["stock"], rel=1e-4)
            assert found["module."] == found["stock"]
            assert found["steps"] == [12, 12, 4]

    @pytest.mark.exhaustive
    def test_weights_without_resuming_start_the_averages(self, tmp_path: Path, reference: Any) -> None:
        folder, expected = reference
        for found in run_ranks(validated, 2, tmp_path, folder):
            assert found["loaded"] == pytest.approx(expected["ema"]["metrics"][-1])
            assert found["tested"] == found["last"]
            assert found["tested"] != found["weights"]
            assert found["same after testing"]


@HOOKS.register_module(force=True)
class OwnLoading(EMAHook):
    """Loads averages and swaps weights without calling the methods that it overrides, as mmpretrain's hook does."""

    has_loaded = False

    def before_train(self, runner: Any) -> None:
        super().before_train(runner)
        if not runner._resume and self.has_loaded:
            for average, param in zip(self.ema_model.module.parameters(), self.src_model.parameters(), strict=True):
                param.data.copy_(average.data)

    def before_val_epoch(self, runner: Any) -> None:
        self._swap_ema_parameters()

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        self.has_loaded = "ema_state_dict" in checkpoint
        if self.has_loaded:
            self._swap_ema_state_dict(checkpoint)
            self.ema_model.load_state_dict(checkpoint["ema_state_dict"], strict=self.strict_load)
        else:
            load_state_dict(self.ema_model.module, copy.deepcopy(checkpoint["state_dict"]), strict=self.strict_load)


def derived(rank: int, folder: Path) -> dict[str, Any]:
    """Train, resume, start from the averages and from weights alone with a derived hook."""
    hook = {"type": "OwnLoading", **CASES["ema"], "strict_load": True}
    epochs = {"train_cfg": {"by_epoch": True, "max_epochs": 2, "val_interval": 1}}
    found: dict[str, Any] = {}
    for name, made in (("local", strategy("local")), ("full", strategy("full")), ("ddp", {"type": "DDPStrategy"})):
        saved = str(folder / name / "epoch_1.pth")
        whole = trained(folder / name, 2, hook, **epochs, strategy=made)
        again = (
            trained(folder / f"{name}-r", 2, hook, **epochs, strategy=made, load_from=saved, resume=True)
            if name == "local"
            else None
        )
        averages = trained(folder / f"{name}-a", 2, hook, **epochs, strategy=made, load_from=saved)
        weights = folder / "weights.pth"
        if name == "full" and rank == 0:
            torch.save({"state_dict": load(Path(saved))["state_dict"]}, weights)
        torch.distributed.barrier()
        alone = (
            trained(folder / f"{name}-w", 2, hook, **epochs, strategy=made, load_from=str(weights))
            if name != "local"
            else None
        )
        found[name] = {"whole": whole, "again": again, "averages": averages, "weights": alone}
    return found


@pytest.mark.exhaustive
def test_hooks_that_load_by_themselves(tmp_path: Path) -> None:
    for found in run_ranks(derived, 2, tmp_path):
        for name, results in found.items():
            if results["again"] is not None:
                assert results["again"]["losses"] == results["whole"]["losses"][4:], name
                assert results["again"]["metrics"] == results["whole"]["metrics"][1:], name
            for case in ("whole", "averages"):
                truth = found["ddp"][case]
                assert results[case]["losses"] == pytest.approx(truth["losses"], rel=1e-4), (name, case)
                for mine, theirs in zip(results[case]["metrics"], truth["metrics"], strict=True):
                    assert mine == pytest.approx(theirs, rel=1e-4), (name, case)
        assert found["full"]["weights"]["losses"] == pytest.approx(found["ddp"]["weights"]["losses"], rel=1e-4)
        # the weights of a checkpoint with averages are the averages, and so is what this hook starts from
        assert found["full"]["weights"]["losses"] == pytest.approx(found["full"]["averages"]["losses"], rel=1e-4)


def strictly(rank: int, folder: Path, saved: Path, hook: type, made: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Load checkpoints that fit and do not; return the error, and whether weights stayed as they were."""
    name = "flat" if made.get("model_wrapper", {}).get("use_orig_params") is False else "ema"
    content = load(saved / name / "epoch_1.pth")
    files = {case: folder / f"{case}.pth" for case in ("fits", "key", "steps")}
    if rank == 0:
        folder.mkdir(exist_ok=True)
        torch.save(content, files["fits"])
        state, ema = content["state_dict"], content["ema_state_dict"]
        torch.save({**content, "ema_state_dict": {k: v for k, v in ema.items() if k != "steps"}}, files["steps"])
        for part, prefix in ((state, ""), (ema, "module.")):
            part[f"{prefix}tail"] = part.pop(f"{prefix}head.bias")
        torch.save(content, files["key"])
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    found = {}
    for case, file in files.items():
        # What resuming does not need is of no interest to what only loads weights, but for the names of these.
        for strict, resume in ((True, True), (False, True), *([(True, False)] if case == "key" else [])):
            config = settings(folder / "work", 1, {"type": hook, **CASES[name], "strict_load": strict}, strategy=made)
            config |= {"load_from": str(file), "resume": resume}
            runner = plain_runner(config)
            runner.call_hook("before_run")
            before = [local(param).clone() for param in runner.model.parameters()]
            try:
                with torch.serialization.safe_globals(safe_globals()):
                    runner.load_or_resume()
                error = ""
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            after = [local(param) for param in runner.model.parameters()]
            same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            found[f"{case} {strict} {resume}"] = error, same
    return found


def local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


def others(rank: int, folder: Path, stock_folder: Path) -> dict[str, Any]:
    """Resume an epoch from checkpoints that others wrote."""
    hook = {"type": "EMAHook", **CASES["ema"]}
    saved = stock_folder / "ema" / "epoch_2.pth"
    content = load(saved)
    prefixed = folder / "prefixed.pth"
    without = folder / "without.pth"
    if rank == 0:
        folder.mkdir(exist_ok=True)
        weights = content["state_dict"]
        torch.save({**content, "state_dict": {f"module.{key}": value for key, value in weights.items()}}, prefixed)
        torch.save({key: value for key, value in content.items() if key != "ema_state_dict"}, without)
    torch.distributed.barrier()
    found: dict[str, Any] = {"steps": []}
    for name, path, made in (
        ("stock", saved, strategy()),
        ("module.", prefixed, strategy()),
        ("without", without, strategy()),
        ("ddp", saved, {"type": "DDPStrategy"}),
    ):
        changes = {"train_cfg": {"by_epoch": True, "max_epochs": 3}, "load_from": str(path), "resume": True}
        work = folder / name.strip(".")
        found[name] = trained(work, 2, hook, **changes, strategy=made)["metrics"][-1]["score"]
        if name != "ddp":
            found["steps"].append(int(load(work / "epoch_3.pth")["ema_state_dict"]["steps"]))
    return found


def validated(rank: int, folder: Path, stock_folder: Path) -> dict[str, Any]:
    hook = {"type": "EMAHook", **CASES["ema"]}
    loop = {"test_dataloader": "val_dataloader", "test_evaluator": "val_evaluator", "test_cfg": "val_cfg"}
    made = settings(folder, 2, hook, strategy=strategy())
    made |= {test: made[val] for test, val in loop.items()}
    alone = runner_of({**made, "load_from": str(stock_folder / "ema" / "epoch_2.pth")})
    found = {"loaded": alone.val()}
    runner = runner_of(made)
    runner.train()
    found["last"] = next(h for h in runner.hooks if type(h).__name__ == "History").metrics[-1]
    before = {name: local(value).clone() for name, value in runner.model.state_dict().items()}
    found["tested"] = runner.test()
    after = {name: local(value) for name, value in runner.model.state_dict().items()}
    found["same after testing"] = all(torch.equal(value, after[name]) for name, value in before.items())
    raw = runner_of({**made, "custom_hooks": [], "load_from": str(folder / "weights.pth")})
    if rank == 0:
        weights = load(folder / "epoch_2.pth")["ema_state_dict"]
        torch.save({key.removeprefix("module."): value for key, value in weights.items()}, folder / "weights.pth")
    torch.distributed.barrier()
    found["weights"] = raw.val()
    return found


def live_bytes() -> int:
    """Bytes of all storages on the CPU that some tensor of this process holds."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def memory(rank: int, folder: Path) -> dict[str, tuple[int, int, int]]:
    """By engine: what averages added to this process, what this rank holds of the model, and the whole model."""
    found = {}
    for engine, wrapper in ENGINES.items():
        whole = Counting(frozen=engine != "flat")
        size = sum(param.numel() * param.element_size() for param in whole.parameters())
        settings = {"auto_wrap_policy": POLICY, **wrapper}
        model = MMFullyShardedDataParallel(whole, **settings)
        hook = EMAHook(momentum=0.2, update_buffers=True)
        runner = SimpleNamespace(model=model, iter=0)
        before = live_bytes()
        hook.before_run(runner)
        hook.after_train_iter(runner, 0)
        added = live_bytes() - before
        held = {id(param): local(param) for param in model.parameters()}
        found[engine] = added, sum(part.numel() * part.element_size() for part in held.values()), size
        del hook, runner, model, whole, held
    return found


@pytest.mark.exhaustive
def test_costs_one_shard(tmp_path: Path) -> None:
    found = run_ranks(memory, 2, tmp_path)
    for engine in ENGINES:
        for added, held, whole in (rank[engine] for rank in found):
            assert held <= added <= held + 100  # buffers and the number of steps
            assert held == whole if engine == "replicate" else held < 0.52 * whole


def test_converts_with_use_ema(tmp_path: Path) -> None:
    run_ranks(ours, 2, tmp_path, ["ema"], "fsdp2", "local")
    source = tmp_path / "ema" / "epoch_2.pth"
    convert(source, tmp_path / "averages.safetensors", use_ema=True)
    entry = open_layout(tmp_path / "averages.safetensors").tensors["head.weight"]
    assert tuple(entry.shape) == (5, 16)
    averages = tensors(source, "state_dict")["head.weight"]
    convert(source, tmp_path / "averages.pth", use_ema=True)
    assert torch.equal(load(tmp_path / "averages.pth")["state_dict"]["head.weight"], averages)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {"ema_type": "ExponentialMovingAvrage"},
        "ema_type 'ExponentialMovingAvrage' is not registered in MODELS. Did you mean 'ExponentialMovingAverage'",
    ),
    "a model": ({"ema_type": "ToyModel"}, "is <class 'tests.mmengine_adapter.toy.ToyModel'>, not a BaseAveragedModel"),
    "argument": ({"momentun": 0.1}, "got an unexpected keyword argument 'momentun'. Did you mean 'momentum'"),
}


def refused(rank: int, folder: Path, name: str, made: dict[str, Any]) -> str:
    runner = runner_of(settings(folder, 2, {"type": "EMAHook", **BAD[name][0]}, strategy=made))
    try:
        runner.train()
    except ConfigError as error:
        return str(error)
    return ""


def without_model(rank: int) -> str:
    class Runner:
        model = None

    try:
        HOOKS.build({"type": "EMAHook"}).before_run(Runner())
    except ConfigError as error:
        return str(error)
    return ""


class TestRefused:
    def test_settings(self, tmp_path: Path) -> None:
        for name, (_, message) in BAD.items():
            for made in (strategy(), {"type": "DDPStrategy"}):
                for text in run_ranks(refused, 2, tmp_path, name, made):
                    assert message in text

    def test_no_model(self) -> None:
        for text in run_ranks(without_model, 2):
            assert "EMAHook averages a model, but the runner's model is 'NoneType'" in text


class TestRegistered:
    def test_in_place_of_the_stock_hook(self) -> None:
        for name in ("EMAHook", "mmengine.EMAHook", "mmfsdp_mmengine.EMAHook"):
            assert HOOKS.get(name) is EMAHook
        assert mmengine.hooks.EMAHook is EMAHook
        assert issubclass(EMAHook, ema_hook.EMAHook)


OWN_HOOKS = """
import math

from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import HOOKS, MODELS


@MODELS.register_module()
class ExpMomentum(ExponentialMovingAverage):
    def avg_func(self, averaged_param, source_param, steps):
        momentum = (1 - self.momentum) * math.exp(-float(1 + steps) / 4) + self.momentum
        averaged_param.lerp_(source_param, momentum)


@HOOKS.register_module()
class OwnEMAHook(EMAHook):
    swaps = 0

    def _swap_ema_parameters(self):
        type(self).swaps += 1
        super()._swap_ema_parameters()
"""
# Forked before anything has imported the package.
IN_BOTH_ORDERS = """
import os
import sys

import mmengine.runner
import own_hooks

folder = sys.argv[1]
for name in ('before', 'after'):
    pid = os.fork()
    if not pid:
        if name == 'after':
            import mmfsdp_mmengine
            del sys.modules['own_hooks'], own_hooks
            for registry in (mmengine.registry.HOOKS, mmengine.registry.MODELS):
                registry.module_dict.pop('OwnEMAHook', None)
                registry.module_dict.pop('ExpMomentum', None)
        import own_hooks
        from tests.mmengine_adapter.toy import config, runner_of
        hook = dict(type='OwnEMAHook', ema_type='ExpMomentum', momentum=0.1, priority='ABOVE_NORMAL')
        runner = runner_of(config(f'{folder}/{name}', 1, custom_hooks=[hook]))
        runner.train()
        assert own_hooks.OwnEMAHook.swaps == 4, own_hooks.OwnEMAHook.swaps
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.mark.exhaustive
def test_modules_imported_before_or_after(tmp_path: Path) -> None:
    (tmp_path / "own_hooks.py").write_text(OWN_HOOKS)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path, str(Path(__file__).parents[2])])}
    (tmp_path / "script.py").write_text(IN_BOTH_ORDERS)
    done = run_script(tmp_path / "script.py", tmp_path, env, 110, [str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (load(tmp_path / name / "epoch_2.pth") for name in ("before", "after"))
    for part in ("state_dict", "ema_state_dict"):
        for name, value in before[part].items():
            assert torch.equal(value, after[part][name]), name
    assert not torch.equal(before["state_dict"]["head.weight"], before["ema_state_dict"]["module.head.weight"])
