"""Names that no registry has: the error says what is near, where it was looked for, and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config, ConfigDict
from mmengine.registry import (
    DATASETS,
    HOOKS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    PARAM_SCHEDULERS,
    RUNNERS,
    TRANSFORMS,
    DefaultScope,
    Registry,
    build_model_from_cfg,
)
from mmengine.runner import Runner
from tests.mmengine_adapter.toy import POLICY, ToyModel, config, runner_of
from torch import nn

from mmfsdp.errors import ConfigError
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine.configs.lookup import UnknownNameError
from mmfsdp_mmengine.runners.patches import patch_mmengine

ROOT = Registry("zoo model", build_func=build_model_from_cfg, scope="root")
BIRDS = Registry("bird model", parent=ROOT, scope="birds")
FISH = Registry("fish model", parent=ROOT, scope="fish")


@ROOT.register_module()
class Cage:
    """Holds what it is told to build, by whatever registry."""

    def __init__(self, animal: Any, registry: Registry = BIRDS) -> None:
        self.animal = registry.build(animal)


@BIRDS.register_module()
class Kingfisher(nn.Module):
    """Is in one scope only."""

    def __init__(self, food: str | None = None) -> None:
        super().__init__()
        if food is not None:
            raise KeyError(food)


def error_of(registry: Registry, built: Any, **default_args: Any) -> str:
    with pytest.raises(KeyError) as caught:
        registry.build(built, **({"default_args": default_args} if default_args else {}))
    assert isinstance(caught.value, UnknownNameError)
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("registry", "name", "near"),
    [
        (MODELS, "ExponentialMovingAverag", "'ExponentialMovingAverage'"),
        (HOOKS, "CheckpointHok", "'CheckpointHook'"),
        (DATASETS, "ConcatDatset", "'ConcatDataset'"),
        (METRICS, "DumpResult", "'DumpResults'"),
        (TRANSFORMS, "Composed", ""),
        (OPTIM_WRAPPER_CONSTRUCTORS, "DefaultOptimConstructor", "'DefaultOptimWrapperConstructor'"),
        (PARAM_SCHEDULERS, "CosineAnealingLR", "'CosineAnnealingLR'"),
    ],
)
def test_mmengine_s_registries(registry: Registry, name: str, near: str) -> None:
    message = error_of(registry, {"type": name})
    assert message.startswith(f"{name} is not in the mmengine::{registry.name} registry.")
    assert f"Looked in mmengine::{registry.name}." in message
    assert "custom_imports" in message
    assert near in message


def test_schedulers_by_epochs_runners_and_default_types() -> None:
    by_epochs = {"type": "ConstantL", "convert_to_iter_based": True, "epoch_length": 2}
    assert "'ConstantLR'" in error_of(PARAM_SCHEDULERS, by_epochs)
    assert "'FlexibleRunner'" in error_of(RUNNERS, Config({"runner_type": "FlexibelRunner"}))
    assert "'Kingfisher'" in error_of(BIRDS, ConfigDict(), type="Kingfischer")


class TestScopes:
    def test_parents_are_searched(self) -> None:
        message = error_of(BIRDS, {"type": "Cages", "animal": None})
        assert message.startswith(
            "Cages is not in the birds::bird model registry. Looked in birds::bird model, root::zoo"
        )
        assert "Did you mean 'Cage'?" in message

    def test_another_scope_has_it(self) -> None:
        for registry in (ROOT, FISH):
            assert "Scope 'birds' has it: write 'birds.Kingfisher'." in error_of(registry, {"type": "Kingfisher"})
        assert "Scope 'birds' was not searched. Did you mean 'Kingfisher'?" in error_of(FISH, {"type": "KingFishr"})

    def test_with_a_scope(self) -> None:
        message = error_of(ROOT, {"type": "birds.Kingfishers"})
        assert "Looked in birds::bird model, and tried to import it as 'birds.Kingfishers'. Did you mean" in message
        message = error_of(FISH, {"type": "mammals.Kingfisher"})
        assert "Looked in no scope, as 'mammals' is none of 'root', 'birds', 'fish'" in message
        assert "write 'birds.Kingfisher'" in message

    def test_by_default_and_in_the_config(self) -> None:
        with DefaultScope.overwrite_default_scope("birds"):
            assert "Looked in birds::bird model, root::" in error_of(ROOT, {"type": "Kingfish"})
        assert "Looked in birds::bird model, root::" in error_of(ROOT, {"type": "Kingfish", "_scope_": "birds"})
        with DefaultScope.overwrite_default_scope("mammals"):
            message = error_of(ROOT, {"type": "Kingfisher"})
        assert "default_scope is 'mammals', but no module of that scope is imported." in message


class TestOnlyWhatIsUnknown:
    def test_the_innermost_name_is_told(self) -> None:
        message = error_of(ROOT, {"type": "Cage", "animal": {"type": "Kingfischer"}})
        assert message.startswith("Kingfischer is not in the birds::bird model registry.")
        message = error_of(ROOT, {"type": "Cage", "animal": {"type": "HeadHook"}, "registry": HOOKS})
        assert message.startswith("HeadHook is not in the mmengine::hook registry.")
        assert error_of(BIRDS, [{"type": "Kingfisher"}, {"type": "Kingfischer"}]).startswith("Kingfischer is")

    @pytest.mark.parametrize("given", [{"type": "Kingfisher", "food": "fish"}, {"food": "fish"}])
    def test_other_key_errors_are_as_they_were(self, given: dict[str, Any]) -> None:
        with pytest.raises(KeyError) as caught:
            BIRDS.build(given)
        assert type(caught.value) is KeyError

    def test_patching_twice_changes_nothing(self) -> None:
        before = Registry.build, Runner.build_dataloader
        patch_mmengine()
        assert (Registry.build, Runner.build_dataloader) == before
        assert isinstance(BIRDS.build({"type": "Kingfisher"}), Kingfisher)


@MODELS.register_module()
class Assembled(ToyModel):
    """Builds a part of itself."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = MODELS.build(part)


WRAPPER = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "model": ({"model": {"type": "ToyModle"}}, ["ToyModle is not in the mmengine::model registry.", "'ToyModel'"]),
    "part of a model": (
        {"model": {"type": "Assembled", "part": {"type": "ToyPreproces"}}},
        ["ToyPreproces is not in the mmengine::model registry.", "'ToyPreprocessor'"],
    ),
    "hook": ({"custom_hooks": [{"type": "Histori"}]}, ["Histori is not in the mmengine::hook registry.", "'History'"]),
    "dataset": ({"dataset": "ToyDatum"}, ["ToyDatum is not in the mmengine::dataset registry.", "'ToyData'"]),
    "collate_fn": (
        {"collate_fn": "default_colate"},
        [
            "default_colate is not in the mmengine::function registry.",
            "'default_collate'",
            "dataloader.collate_fn.type",
        ],
    ),
    "evaluator": ({"val_evaluator": {"type": "Acuracy"}}, ["Acuracy is not in the mmengine::metric", "'Accuracy'"]),
    "optimizer": (
        {"optim_wrapper": {"optimizer": {"type": "AdmW", "lr": 0.1}}},
        ["AdmW is not in the mmengine::optimizer registry.", "'AdamW'"],
    ),
    "constructor": (
        {"optim_wrapper": {"optimizer": {"type": "AdamW"}, "constructor": "LayerDecayConstructor"}},
        ["LayerDecayConstructor is not in the mmengine::optimizer wrapper constructor registry."],
    ),
    "scheduler": (
        {"param_scheduler": [{"type": "LinearL", "start_factor": 0.5}]},
        ["LinearL is not in the mmengine::parameter scheduler registry.", "'LinearLR'"],
    ),
    "loop": (
        {"train_cfg": {"type": "EpochTrainLoop", "max_epochs": 1}},
        ["EpochTrainLoop is not in", "'EpochBasedTrain"],
    ),
}
WRAPPERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "type": (
        {"type": "MMFulySharded"},
        ["MMFulySharded is not in the mmengine::model_wrapper registry.", "Did you mean 'MMFullyShardedDataParallel'"],
    ),
    "argument": (
        {**WRAPPER, "shard_strategy": "FULL_SHARD"},
        ["MMFullyShardedDataParallel has no argument 'shard_strategy'. Did you mean 'sharding_strategy'"],
    ),
    "argument of DDP": (
        {"type": "MMDistributedDataParallel", "find_unused_params": True},
        ["MMDistributedDataParallel has no argument 'find_unused_params'. Did you mean 'find_unused_parameters'"],
    ),
}


def fail(rank: int, folder: Path) -> dict[str, str]:
    """The errors of all cases, each in a run of its own: of both runners, and of the wrapper in both ways."""
    found = {}

    def note(name: str, start: Any) -> None:
        try:
            start()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for kind in ("flexible", "plain"):
        for name, (changes, _) in CASES.items():
            settings = config(folder, 2, **changes)
            for setting in {"dataset", "collate_fn"} & {*changes}:
                settings["train_dataloader"][setting] = {"type": settings.pop(setting)}
            if kind == "flexible":
                note(f"{kind} {name}", lambda settings=settings: runner_of(settings).train())
            else:
                del settings["strategy"]
                settings |= {"launcher": "pytorch", "model_wrapper_cfg": WRAPPER, "experiment_name": f"unknown {name}"}
                note(f"{kind} {name}", lambda settings=settings: Runner.from_cfg(Config(settings)).train())
    for name, (wrapper, _) in WRAPPERS.items():
        settings = config(folder, 2)
        settings["strategy"]["model_wrapper"] = wrapper
        note(f"flexible wrapper {name}", lambda settings=settings: runner_of(settings).train())
        del settings["strategy"]
        settings |= {"launcher": "pytorch", "model_wrapper_cfg": wrapper, "experiment_name": f"unknown wrapper {name}"}
        note(f"plain wrapper {name}", lambda settings=settings: Runner.from_cfg(Config(settings)).train())
    return found


def test_every_rank_is_told(tmp_path: Path) -> None:
    expected = {name: parts for name, (_, parts) in CASES.items()}
    expected |= {f"wrapper {name}": parts for name, (_, parts) in WRAPPERS.items()}
    for found in run_ranks(fail, 2, tmp_path):
        for name, parts in expected.items():
            for kind in ("flexible", "plain"):
                for part in parts:
                    assert part in found.get(f"{kind} {name}", "nothing"), (kind, name)
    assert not [*tmp_path.glob("*.pth")]
