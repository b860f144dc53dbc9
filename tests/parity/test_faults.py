"""Faults are found at the tensor where they begin, on two and four ranks: `nox -s parity`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.faults import FAULTS
from tests.distributed.recorded import compared, recorded, reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LATER_IN_BFLOAT16 = {"labels_are_shifted"}
"""It is noticed at a later tensor than in float32."""

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
    assert first.key.kind in fault.kinds, str(first)
    assert first.key.name.startswith(fault.place), str(first)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAULTS if not FAULTS[name].only])
def test_bfloat16(name: str, ranks: int, references: dict[str, Run], tmp_path: Path) -> None:
    fault = FAULTS[name]
    run = recorded(tmp_path / name, fault.how, ranks, fault, dtype=torch.bfloat16)
    first = compared(references["bfloat16"], run).first
    assert first is not None
    if name not in LATER_IN_BFLOAT16:
        assert first.key.kind in fault.kinds, str(first)
        assert first.key.name.startswith(fault.place), str(first)
