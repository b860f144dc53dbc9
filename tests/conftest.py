"""Holds for all tests: long ones run first, and what was imported is never looked through for garbage again."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # So that no worker waits for another one at the end. By the names of files, which mixes tests of one process with
    # those of several.
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.name))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
