"""Each fault is found, on two and four ranks, in float32 at the tensor where it begins: `nox -s parity`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.faults import FAULTS
from tests.distributed.recorded import compared, recorded, reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

BELOW_BFLOAT16 = {"one_rank_computes_something_else", "a_stale_average_is_copied_back", "one_replica_drifts"}
"""They change less than ten times what rounding does."""

Run = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("references")
    return {name: reference(folder / name, dtype=dtype) for name, dtype in DTYPES.items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_float32(name: str, ranks: int, references: dict[str, Run], tmp_path: Path) -> None:
    fault = FAULTS[name]
    first = compared(references["float32"], recorded(tmp_path / name, fault.how, ranks, fault)).first
    assert first is not None
    assert (first.key.kind, first.key.name.startswith(fault.place)) == (fault.kind, True), str(first)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAULTS if not FAULTS[name].only and name not in BELOW_BFLOAT16])
def test_bfloat16(name: str, ranks: int, references: dict[str, Run], tmp_path: Path) -> None:
    fault = FAULTS[name]
    run = recorded(tmp_path / name, fault.how, ranks, fault, dtype=torch.bfloat16)
    assert not compared(references["bfloat16"], run).same
