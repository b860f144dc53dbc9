"""Holds for all tests: what was imported while they were collected is never looked through for garbage again."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
