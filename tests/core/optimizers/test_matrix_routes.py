"""What ranks send each other so that each matrix is whole on its owner, for any mesh; pure arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.errors import PlanError
from mmfsdp.optimizers.matrices import Matrix, assign_owners, matrices_of
from mmfsdp.optimizers.routes import route_of
from mmfsdp.optimizers.shards import TensorDivision
from mmfsdp.planning.matrix_steps import divide_into_buckets

SHAPES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 3), st.integers(1, 5), st.data())
def test_every_element_reaches_its_owner_and_every_update_all_that_hold_it(
    shapes: list[tuple[int, int]], replicate: int, shard: int, data: st.DataObject
) -> None:
    ranks = replicate * shard
    matrices, divisions = [], []
    for shape in shapes:
        found = matrices_of(shape)
        matrices += found
        divisions += [TensorDivision(shape, (replicate, shard), (False, True))] * len(found)
    owners = [data.draw(st.integers(0, ranks - 1)) for _ in matrices]
    routes = [route_of(matrices, owners, divisions, rank, ranks) for rank in range(ranks)]
    for one in range(ranks):
        for other in range(ranks):
            for sent, received in (("given", "collected"), ("answered", "returned")):
                there, here = getattr(routes[one], sent)[other], getattr(routes[other], received)[one]
                assert [(piece.index, piece.numel) for piece in there] == [(piece.index, piece.numel) for piece in here]
    for place, (matrix, owner, division) in enumerate(zip(matrices, owners, divisions, strict=True)):
        spans = [piece.span for pieces in routes[owner].collected for piece in pieces if piece.index == place]
        elements = [element for start, end in spans for element in range(start, end)]
        assert elements == [*range(matrix.numel)]  # in order, each once
        for rank in range(ranks):
            [mine] = [piece for pieces in routes[rank].returned for piece in pieces if piece.index == place]
            start, end = division.span(rank)
            assert mine.numel == end - start


def test_a_rank_of_thousands_plans_only_what_it_exchanges() -> None:
    ranks = 2048
    division = TensorDivision((4096, 16), (ranks,), (True,))
    matrices, divisions = [Matrix(0, 4096, 16)] * 300, [division] * 300
    owners = assign_owners([1.0] * 300, ranks)
    route = route_of(matrices, owners, divisions, 7, ranks)
    assert sum(map(len, route.given)) == 300
    assert sum(map(len, route.returned)) == 300
    assert sum(map(len, route.answered)) == ranks * owners.count(7)


def test_stacks_and_fused_weights() -> None:
    assert matrices_of((6, 4), parts=3) == [Matrix(0, 2, 4), Matrix(8, 2, 4), Matrix(16, 2, 4)]
    assert matrices_of((2, 3, 4), is_stack=True) == [Matrix(0, 3, 4), Matrix(12, 3, 4)]
    assert matrices_of((8, 3, 2, 2)) == [Matrix(0, 8, 12)]
    assert matrices_of((0, 4)) == []
    with pytest.raises(PlanError, match="7 rows of a parameter of shape"):
        matrices_of((7, 4), parts=3)
    with pytest.raises(PlanError, match="is not a matrix"):
        matrices_of((7,))


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_owners_have_about_equal_work(costs: list[float], ranks: int) -> None:
    loads = [0.0] * ranks
    for owner, cost in zip(assign_owners(costs, ranks), costs, strict=True):
        loads[owner] += cost
    # Whoever has most got its last matrix while it had least, so that the mean bounds what it had before.
    assert max(loads) <= sum(costs) / ranks + max(costs) + 1e-9


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100), st.integers(1, 9))
def test_buckets_keep_the_order_and_their_bound(sizes: list[int], most: int, ranks: int) -> None:
    buckets = divide_into_buckets(sizes, most, ranks)
    assert [place for bucket in buckets for place in bucket] == [*range(len(sizes))]
    for bucket in buckets:
        assert len(bucket) == 1 or 6 * sum(sizes[place] for place in bucket) <= most * min(ranks, 6)
    assert math.fsum(map(len, buckets)) == len(sizes)
