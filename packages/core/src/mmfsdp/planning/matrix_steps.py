"""The buckets and FLOPs of a step of Muon: plans show them, and the optimizer steps by them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide_into_buckets", "muon_flops"]

_HELD = 6
"""Parts of buckets that a rank holds at once: it sends and receives parts of the next bucket, owns a part of this one
and its updates, and sends and receives updates of the one before."""


def divide_into_buckets(sizes: Sequence[int], most: int, ranks: int) -> list[list[int]]:
    """Return the indices of ``sizes`` in order, in buckets of at most ``most`` together, or of one.

    On fewer than six ranks buckets are smaller, as parts are larger: all that a rank holds take about ``most``.

    Args:
        sizes: Bytes of each parameter in a message; all parameters that travel on one mesh, whatever their param group.
        most: Bytes of a bucket.
        ranks: Ranks of the mesh.
    """
    buckets: list[list[int]] = []
    held, most = 0, most * min(ranks, _HELD) // _HELD
    for index, size in enumerate(sizes):
        if not buckets or held + size > most:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return buckets


def muon_flops(rows: int, columns: int, steps: int) -> int:
    """Return the FLOPs of Muon's iterations on one matrix: three products each, in the smaller of both dimensions.

    Args:
        rows: Rows of the matrix.
        columns: Its columns.
        steps: Newton-Schulz iterations, ``ns_steps``.
    """
    short, long = sorted((rows, columns))
    return 2 * steps * (2 * short**2 * long + short**3)
