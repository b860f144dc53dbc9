"""What is replaced in MMEngine itself."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from mmengine._strategy.fsdp import FSDPStrategy as MMEngineStrategy
from mmengine.config import Config
from mmengine.runner import FlexibleRunner
from tests.mmengine_adapter.toy import Block, config

from mmfsdp.testing import single_rank
from mmfsdp_mmengine import FSDPStrategy


def test_functions_in_a_config_are_written_by_name() -> None:
    values = {"f": functools.partial(print, end=""), "classes": {Block}, "device": torch.device("cpu"), "n": [1, "a"]}
    text = Config(values).pretty_text
    assert "'partial(builtins.print)'" in text
    assert "tests.mmengine_adapter.toy.Block" in text
    assert "'cpu'" in text
    assert Config({"n": 1}).pretty_text == "n = 1\n"


def test_a_stock_strategy_as_an_object(tmp_path: Path) -> None:
    settings = config(tmp_path, 1)
    settings["strategy"]["type"] = MMEngineStrategy
    with single_rank():
        runner = FlexibleRunner.from_cfg(Config(settings))
    assert type(runner.strategy) is FSDPStrategy


def test_from_cfg_without_env_cfg_and_with_compile(tmp_path: Path) -> None:
    settings = config(tmp_path, 1, compile={"backend": "eager"}, model_wrapper=Block, experiment_name="compiled")
    del settings["env_cfg"]
    with single_rank():
        runner = FlexibleRunner.from_cfg(Config(settings))
    assert runner._compile == {"backend": "eager"}
