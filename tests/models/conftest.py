"""Ranks are real processes that tests share; what is compared with is trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.models.training import Outcome, train

from mmfsdp.testing import close_ranks, run_ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    close_ranks()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Runs in a single process with MMEngine's own unsharded strategy, each done once."""
    done: dict[str, Outcome] = {}

    def reference(family: str, **changes: Any) -> Outcome:
        key = f"{family} {sorted(changes.items())!r}"
        if key not in done:
            folder = tmp_path_factory.mktemp(family)
            [done[key]] = run_ranks(train, 1, folder, 1, family, {"type": "SingleDeviceStrategy"}, changes)
        return done[key]

    return reference
