"""Checksums of what 2,000 ranks wrote are joined by all of them, a little each."""

from __future__ import annotations

import math
import zlib

from benchmarks.simulated import run_threads

from mmfsdp.collective.scopes import Scope
from mmfsdp.saving.writing.shared_files import WrittenParts, joined_on_first

DATA = {"a": bytes(range(251)) * 40, "b": b"of three ranks alone"}


def written(scope: Scope) -> WrittenParts | None:
    """Each rank wrote some rows of ``a``, the last ranks none; three wrote ``b``, which has a gap."""
    rows = math.ceil(len(DATA["a"]) / scope.size)
    own: WrittenParts = {}
    part = DATA["a"][scope.rank * rows : (scope.rank + 1) * rows]
    if part:
        own["a"] = [(100 + scope.rank * rows, len(part), zlib.crc32(part))]
    if scope.rank in (1, 2, scope.size - 1):
        own["b"] = [(10_000 * scope.rank, len(DATA["b"]), zlib.crc32(DATA["b"]))]
    return joined_on_first(own, scope)


def test_every_rank_does_a_little() -> None:
    for size in (4, 37, 300):
        ranks = run_threads(written, size)
        assert all(rank.result is None for rank in ranks[1:])
        found = ranks[0].result
        assert found["a"] == [(100, len(DATA["a"]), zlib.crc32(DATA["a"]))]
        crc = zlib.crc32(DATA["b"])
        assert found["b"] == [(10_000 * place, len(DATA["b"]), crc) for place in (1, 2, size - 1)]
        assert [rank.messages for rank in ranks] == [0] + [1] * (size - 1)
        assert max(rank.sent_bytes for rank in ranks) < 300


def test_one_rank_alone() -> None:
    [rank] = run_threads(lambda scope: joined_on_first({"a": [(8, 4, 5)]}, scope), 1)
    assert rank.result == {"a": [(8, 4, 5)]}
