"""What the adapter's tests compare with: unsharded runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.mmengine_adapter.toy import UNSHARDED, train

from mmfsdp.testing import preload, run_ranks

# Not what registers: some ranks are to see stock MMEngine.
preload("matplotlib.pyplot", "mmengine.runner", "pytest", "torch.utils.cpp_extension")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs with MMEngine's own unsharded strategy, by their changes to the config, each done once."""
    done: dict[str, Any] = {}

    def reference(**changes: Any) -> dict[str, Any]:
        key = repr(sorted(changes.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("unsharded")
            [done[key]] = run_ranks(train, 1, folder, 1, {**changes, "strategy": UNSHARDED})
        return done[key]

    return reference
