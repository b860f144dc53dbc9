"""Programs written for torch's FSDP1 run with only the import changed, to the same losses and checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.torch_class import close

from mmfsdp.testing import run_ranks

PROGRAMS = Path(__file__).parents[1].joinpath("programs")
TORCHS = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
OURS = "from mmfsdp import FullyShardedDataParallel as FSDP\n"


def run(rank: int, name: str, imports: str, folder: str) -> Any:
    source = PROGRAMS.joinpath(f"{name}.py").read_text(encoding="utf-8")
    assert source.count(TORCHS) == 1
    program: dict[str, Any] = {"__name__": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own class, which warns about its methods
        exec(compile(source.replace(TORCHS, imports), f"{name}.py", "exec"), program)
        return program["main"](rank, dist.get_world_size(), folder)


@pytest.mark.sample("digits")
@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_only_the_import_changes(name: str, tmp_path: Path) -> None:
    folders, results = [], []
    for imports in (TORCHS, OURS):
        folders.append(tmp_path / imports.split()[1])
        folders[-1].mkdir()
        results.append(run_ranks(run, 2, name, imports, str(folders[-1])))
    theirs, ours = results
    close(ours, theirs)
    stored = [{path.name: torch.load(path) for path in folder.glob("*.pt")} for folder in folders]
    assert stored[0]
    close(*map(ordered, reversed(stored)))


def ordered(stored: Any) -> Any:
    """Return optimizer states whose groups name parameters in the order of the alphabet; flat ones have their own."""
    if not isinstance(stored, dict):
        return stored
    if "params" in stored:
        return {**stored, "params": sorted(stored["params"])}
    return {key: [*map(ordered, value)] if key == "param_groups" else ordered(value) for key, value in stored.items()}
