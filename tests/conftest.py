"""Holds for all tests: long ones run first, one thread computes, and what was imported is never garbage again."""

from __future__ import annotations

import gc
import os

import pytest

# Before torch is imported, and for all processes that tests start. What tests compute is so small that a second thread
# mostly spins: without this, tests in one process took a quarter more processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # So that no worker waits for another one at the end. By the names of files, which mixes tests of one process with
    # those of several.
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.name))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
