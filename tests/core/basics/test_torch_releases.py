"""Every difference between releases of torch is where it belongs, is still needed, and begins where the table says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state

from mmfsdp import plan
from mmfsdp.basics import torch_releases
from mmfsdp.basics.torch_version import MINIMUM_TORCH, NEWEST_TESTED_TORCH, installed_release

ROOT = Path(__file__).parents[3]
DIFFERENCES = {name: getattr(torch_releases, name) for name in torch_releases.__all__ if name.isupper()}
SEEN = {
    "HAS_SEVERAL_GROUPS": lambda: hasattr(_fsdp_state.FSDPState(), "_fsdp_param_groups"),
    "RESETS_ITERATIONS": lambda: hasattr(FSDPModule, "reset_iter_state"),
    "RUNS_UNITS_IN_PARTS": lambda: hasattr(_fsdp_state.FSDPState, "_force_complete_incomplete_states"),
    "COUNTS_EVERY_GROUP": lambda: "group_count" in inspect.getsource(distributed_c10d._hash_ranks_to_str),
    "ACCUMULATES_IN_GRAD": lambda: not hasattr(_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed"),
}


@pytest.fixture
def as_release() -> Iterator[pytest.MonkeyPatch]:
    installed_release.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    installed_release.cache_clear()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_is_needed(name: str) -> None:
    """Fails once no supported release differs: delete the constant, and the code for older releases."""
    assert MINIMUM_TORCH < DIFFERENCES[name] <= NEWEST_TESTED_TORCH


def test_nox_runs_the_oldest_the_pinned_and_the_newest() -> None:
    [named] = re.findall(r"^RELEASES = \((.+)\)$", (ROOT / "noxfile.py").read_text(), flags=re.MULTILINE)
    releases = [(int(major), int(minor)) for major, minor in re.findall(r'"(\d+)\.(\d+)\.\d+"', named)]
    assert (releases[0], releases[-1]) == (MINIMUM_TORCH, NEWEST_TESTED_TORCH)
    assert releases == sorted(releases)


@pytest.mark.parametrize("name", SEEN)
def test_begins_with_its_release(name: str) -> None:
    assert SEEN[name]() == (installed_release() >= DIFFERENCES[name])


def test_nothing_else_asks_for_the_release() -> None:
    asking = re.compile(r"installed_release|torch\.version\b|torch (>=|<)|hasattr\(torch\b(?!, name)")
    found = {path.name for path in (ROOT / "packages").rglob("*.py") if asking.search(path.read_text())}
    assert found == {"torch_releases.py", "torch_version.py"}


def test_the_oldest_release_is_in_the_docs() -> None:
    for name in ("docs/howto/install.md", "packages/core/README.md"):
        assert f"torch {'.'.join(map(str, MINIMUM_TORCH))} or" in (ROOT / name).read_text(), name


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.99.0a0+git1234", True),
        (f"{NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1]}.7", False),
        (".".join(map(str, MINIMUM_TORCH)), False),
        ("master", True),
    ],
)
def test_a_torch_that_was_not_tested_gets_a_note(version: str, said: bool, as_release: pytest.MonkeyPatch) -> None:
    as_release.setattr(torch, "__version__", version)
    notes = [note.text for note in plan(nn.Linear(2, 2), mesh=2).notes if note.kind == "torch"]
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    sentence = f"torch {version} is newer than {newest}, the newest release that mmfsdp was tested with."
    assert notes == ([sentence] if said else [])
