"""Holds for all tests: slow ones run first, and what was imported is never looked through for garbage again."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # so that no process waits for them at the end


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
