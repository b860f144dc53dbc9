"""Holds for all tests: long ones run first, one thread computes, and what was imported is never garbage again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for all processes that tests start. What tests compute is so small that a second thread
# mostly spins: without this, tests in one process took a quarter more processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A processor with AMX holds more in convolutions of 16 bits than rehearsals say: docs/explanation/rehearsal_time.md.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROOT = Path(__file__).parents[1]
IN_REPOSITORY = ROOT.joinpath("noxfile.py").exists()
NEEDED = re.compile(
    r'^ *(?:from|import) ((?:tests|tools|benchmarks)\.[\w.]+)|/ "((?:docs|examples|packages)\b|noxfile\.py)',
    re.MULTILINE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that need what an sdist lacks: it has one package of the repository, and its tests."""
    if IN_REPOSITORY or collection_path.suffix != ".py":
        return None
    needed = [ROOT / (file or module.replace(".", "/")) for module, file in NEEDED.findall(collection_path.read_text())]
    return True if any(not path.exists() and not path.with_suffix(".py").exists() for path in needed) else None


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers, their ranks and commands from one process, which alone imports torch and the like.

    Not if coverage is measured, which begins when Python does.
    """
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["executable"]  # not what forks: what a test starts by it begins anew
        multiprocessing.set_start_method(None, force=True)  # as a process begins: MMEngine warns where it changes this
    elif "popen" in (getattr(config.option, "tx", None) or []) and "coverage" not in sys.modules:
        from tests.forked_scripts import python

        capture = config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # of what ranks print; `pytest -s` shows it
        config.add_cleanup(capture.read_global_capture)  # else it is shown at the end
        forked = f"popen//python={python()}"
        capture.suspend_global_capture()
        config.option.tx = [forked if kind == "popen" else kind for kind in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["executable"] = sys.executable


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_exhaustive(items)
    # So that no worker waits for another one at the end. By the names of files, which mixes tests of one process with
    # those of several.
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.name))


def mark_exhaustive(items: list[pytest.Item]) -> None:
    """Mark the cases of tests that are not in the sample which the test names."""
    cases: dict[str, list[str]] = {}
    samples: dict[str, tuple[str, ...]] = {}
    for item in items:
        if sample := item.get_closest_marker("sample"):
            case: str = item.callspec.id  # type: ignore[attr-defined]
            test = item.nodeid.removesuffix(f"[{case}]")
            cases.setdefault(test, []).append(case)
            samples[test] = sample.args
            if case not in sample.args:
                item.add_marker(pytest.mark.exhaustive)
    for test, sample in samples.items():
        if len(cases[test]) > 1 and {*sample}.isdisjoint(cases[test]):  # one may be asked for by its name
            raise pytest.UsageError(f"{test}: none of the sample {sample} is a case, which are {cases[test]}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_ranks() -> Iterator[None]:
    """End the ranks of a file of tests with it, so that no file meets what another one left in their processes."""
    yield
    if "mmfsdp.testing" in sys.modules:
        sys.modules["mmfsdp.testing"].close_ranks()
