"""Peaks of steps whose units Inductor compiles are what a rehearsal says: each case compiles for seconds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.families import FAMILIES
from tests.distributed.measured import SETTINGS, measure, rehearsed

from mmfsdp.testing import run_ranks

CASES = [
    ("llama", "fp32", "none"),
    ("llama", "bf16", "ops"),
    ("gpt2", "bf16", "none"),
    ("convnext", "fp32", "none"),
    ("bert", "fp32", "selective"),
    ("detr", "fp32", "none"),
]


@pytest.mark.parametrize(("family", "precision", "activations"), CASES)
def test_a_compiled_step(family: str, precision: str, activations: str) -> None:
    config: dict[str, Any] = {"precision": precision, "compile": True, **SETTINGS[activations]}
    config["wrap"] = {"kind": "module_class", "classes": list(FAMILIES[family].layer)}
    peak, _, _ = run_ranks(measure, 2, family, config, 4, 1)[0]
    assert rehearsed(family, config, 4, 1, 2).peak.nbytes == pytest.approx(peak, rel=0.03)
