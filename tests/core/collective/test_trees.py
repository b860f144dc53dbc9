"""Gathering and scattering among many ranks: each gets its own, in as few messages as a tree has levels."""

from __future__ import annotations

import pytest
from benchmarks.simulated import Work, run_threads

from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import gather_to_first, scatter_objects


def there_and_back(scope: Scope) -> tuple[list[str] | None, str]:
    gathered = gather_to_first(scope, f"from {scope.rank}")
    return gathered, scatter_objects(scope, None if gathered is None else [f"{text} and back" for text in gathered])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_every_rank_gets_its_own(size: int) -> None:
    works = run_threads(there_and_back, size)
    assert works[0].result[0] == [f"from {place}" for place in range(size)]
    assert [work.result[1] for work in works] == [f"from {place} and back" for place in range(size)]
    assert all(work.result[0] is None for work in works[1:])


def test_messages_grow_with_the_levels_of_a_tree() -> None:
    def most(works: list[Work]) -> int:
        return max(work.messages for work in works)

    few, many = run_threads(there_and_back, 8), run_threads(there_and_back, 512)
    assert (few[0].messages, many[0].messages) == (3, 9)
    assert (most(few), most(many)) == (3, 9)
    assert sum(work.messages for work in many) == 2 * 511
