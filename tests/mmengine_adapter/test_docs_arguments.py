"""migrating_from_mmengine.md has a row for every argument of the three classes, and none for any that is gone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mmengine._strategy
import mmengine.model
import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

import mmfsdp_mmengine
from mmfsdp.torch_style.arguments import ARGUMENTS
from mmfsdp_mmengine.doctor.running import parameters_of

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "migrating_from_mmengine.md").read_text(encoding="utf-8")
EXPECTED = {
    "MMFullyShardedDataParallel": {
        *parameters_of(mmfsdp_mmengine.MMFullyShardedDataParallel),
        *ARGUMENTS,
        *parameters_of(mmengine.model.MMFullyShardedDataParallel),
        *inspect.signature(FullyShardedDataParallel.__init__).parameters,
    }
    - {"self"},
    "FSDPStrategy": {
        *parameters_of(mmfsdp_mmengine.FSDPStrategy),
        *parameters_of(mmengine._strategy.FSDPStrategy),
    },
    "MMDistributedDataParallel": {
        *parameters_of(mmfsdp_mmengine.MMDistributedDataParallel),
        *parameters_of(mmengine.model.MMDistributedDataParallel),
    },
}
# Arguments that DistributedDataParallel has got after the oldest release of torch that mmfsdp supports.
NEWER = {"bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_argument_has_a_row(name: str) -> None:
    section = TEXT.partition(f"### {name}, argument by argument\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [argument for row in rows for argument in re.findall(r"`(\w+)`", row)]
    assert len(listed) == len({*listed})
    newer = NEWER if name == "MMDistributedDataParallel" else set()
    assert EXPECTED[name] <= {*listed} <= EXPECTED[name] | newer


def test_the_expected_arguments_are_found() -> None:
    assert {"find_unused_parameters", "device_ids"} <= EXPECTED["MMDistributedDataParallel"]
    assert {"sync_bn", "work_dir", "model_wrapper"} <= EXPECTED["FSDPStrategy"]
    assert {"limit_all_gathers", "fsdp_auto_wrap_policy", "engine"} <= EXPECTED["MMFullyShardedDataParallel"]
