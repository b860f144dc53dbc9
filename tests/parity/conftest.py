"""Ranks are real processes that tests share; they end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmfsdp.testing import close_ranks, preload

preload("pytest")


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    close_ranks()
