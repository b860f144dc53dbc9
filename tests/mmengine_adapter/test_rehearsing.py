"""A config's own step is rehearsed: its pipeline, preprocessor, loss, optimizer, clipping and accumulation."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import DATASETS, MODELS
from tests.mmengine_adapter.pictured import Pictured

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.frontends import ReadConfig, read_config

TEXT = """
custom_imports = dict(imports=['tests.mmengine_adapter.pictured'], allow_failed_imports=False)
data_preprocessor = dict(type='ImgDataPreprocessor', mean=[1, 2, 3], std=[1, 1, 1], pad_size_divisor=32)
model = dict(type='Pictured')
inner = dict(type='Anything', pipeline=[dict(type='Load'), dict(type='Crop', heights=[0, 30, 40], width=50)])
train_dataloader = dict(batch_size=3, dataset=dict(type='Repeat', dataset=inner, pipeline=[dict(type='Pack')]))
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=0.1), clip_grad=dict(max_norm=1.0),
    accumulative_counts=2, paramwise_cfg=dict(norm_decay_mult=0))
"""
SIZE = (40, 50)  # the largest crop


def read(folder: Path, *changes: tuple[str, str]) -> ReadConfig:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config.py").write_text(text)
    return read_config(folder / "config.py")


@pytest.mark.sample("AmpOptimWrapper-dtype1")
@pytest.mark.parametrize(("wrapper", "dtype"), [("OptimWrapper", None), ("AmpOptimWrapper", torch.bfloat16)])
def test_it_is_the_step_that_a_loop_runs(tmp_path: Path, wrapper: str, dtype: torch.dtype | None) -> None:
    named = f"type='{wrapper}'" + (f", dtype='{str(dtype)[6:]}'" if dtype else "")
    config = read(tmp_path, ("optim_wrapper = dict(", f"optim_wrapper = dict({named}, "))
    model = config.model()
    step = config.step(model)
    assert [tuple(image.shape) for image in step.batch["inputs"]] == [(3, *SIZE)] * 3
    assert (step.max_norm, step.accumulate) == (1.0, 2)
    plan = mmfsdp.plan(model, None, 4)
    found = mmfsdp.rehearse(plan, model, step.batch, **step.arguments())

    classes = torch.zeros(3, *SIZE, dtype=torch.int64)

    def loss(module: Any, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            inputs = (images.float() - module.data_preprocessor.mean) / module.data_preprocessor.std
            return module(torch.nn.functional.pad(inputs, (0, 14, 0, 24)), Labels(classes), "loss")["loss_pixels"]

    by_hand = mmfsdp.rehearse(
        plan,
        model,
        torch.empty(3, 3, *SIZE, dtype=torch.uint8),
        loss=loss,
        optimizer="sgd-momentum",
        max_norm=1.0,
        accumulate=2,
    )
    assert found.collectives == tuple(
        type(item)(**{**{name: getattr(item, name) for name in item.__slots__}, "moment": mine.moment})
        for item, mine in zip(by_hand.collectives, found.collectives, strict=True)
    )
    assert found.static["optimizer state"] == by_hand.static["optimizer state"]
    assert found.peak.nbytes == pytest.approx(by_hand.peak.nbytes, rel=0.03)
    assert len(config.step(model, 5).batch["inputs"]) == 5


class Labels(list[Any]):
    """Samples of a stacked tensor."""

    def __init__(self, classes: torch.Tensor) -> None:
        super().__init__(type("Sample", (), {"classes": row})() for row in classes)


def rehearse(config: ReadConfig) -> None:
    model = config.model()
    step = config.step(model)
    mmfsdp.rehearse(None, model, step.batch, **step.arguments())


def test_the_context_says_what_is_missing(tmp_path: Path) -> None:
    for old, new, path, message in (
        ("dict(type='Load')", "dict(type='Loda')", "train_dataloader.dataset.dataset.pipeline[0]", "Load"),
        ("width=50", "width='w'", "train_dataloader.dataset.dataset.pipeline[1]", "Crop fails on an invented image"),
        ("[0, 30, 40]", "[0]", "train_dataloader.dataset.pipeline", "drops the invented image each time"),
        ("batch_size=3, ", "", "train_dataloader.batch_size", "Give --batch-size"),
        ("train_dataloader", "other_dataloader", "train_dataloader.batch_size", "how many samples"),
        ("type='Pictured'", "type='Pictured', own_step=True", "model", "has its own train_step"),
        (", weight_decay=0.1", "", "optim_wrapper", "ValueError: base_wd should not be None"),
    ):
        config = read(tmp_path, (old, new))
        with pytest.raises(ConfigError, match=message) as caught:
            rehearse(config)
        assert caught.value.context["config"] == path
    assert MODELS.get("Pictured") is Pictured


def test_averaged_weights_are_part_of_the_step(tmp_path: Path) -> None:
    hook = "custom_hooks = [dict(type='EMAHook', ema_type='MomentumAnnealingEMA', gamma=50, update_buffers=True)]\n"
    config = read(tmp_path, ("inner =", f"{hook}inner ="))
    model = config.model()
    step = config.step(model)
    found = mmfsdp.rehearse(None, model, step.batch, mesh=4, **step.arguments())
    counter = 8  # bytes of the averages' count of steps
    assert found.static["ema"] == found.static["parameter"] + found.static["buffer"] + counter
    assert dict(found.phases)["ema"] > dict(found.phases)["optimizer"]
    assert any(item.name == "aten::lerp_" and item.phase == "ema" for item in found.operators)
    assert read(tmp_path).step(model).ema is None


@DATASETS.register_module(force=True)
class Bare:
    """Two samples, of a data set that has no pipeline."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"inputs": torch.full((3, 8, 8), float(place)), "data_samples": None}


def test_a_data_set_without_a_pipeline_gives_its_own_samples(tmp_path: Path) -> None:
    own = ("dataset=dict(type='Repeat', dataset=inner, pipeline=[dict(type='Pack')])", "dataset=dict(type='Bare')")
    config = read(tmp_path, own, ("tests.mmengine_adapter.pictured", __name__))
    step = config.step(config.model())
    assert [image.mean().item() for image in step.batch["inputs"]] == [0, 1, 0]
    assert step.assumed == ("3 samples per rank, of the config's own data set",)
    assert step.evaluate is None  # there is no data set of validation
    config = read(tmp_path, (own[0], "dataset=dict(type='Bare', root='x')"))
    with pytest.raises(ConfigError, match=r"Bare gives no samples: TypeError: .* Give the shapes") as caught:
        config.step(config.model())
    assert caught.value.context["config"] == "train_dataloader.dataset"
