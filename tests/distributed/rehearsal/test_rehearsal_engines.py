"""What a rehearsal predicts for each engine and strategy is what ranks hold, to the byte, and what they send."""

from __future__ import annotations

import pytest
from tests.distributed.engines import configs_of, rehearsed_step, steps

from mmfsdp.testing import run_ranks


@pytest.mark.sample("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_engines(ranks: int) -> None:
    names = configs_of(ranks)
    names = names if ranks == 4 else names[:1] + names[-1:]
    last = ranks - 1  # its shards are the smallest
    for name, real in zip(names, run_ranks(steps, ranks, names)[last], strict=True):
        assert rehearsed_step(name, ranks, last) == real, name
