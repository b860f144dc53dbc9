"""Turns the errors of gloo and NCCL into an error that says what a rank was waiting for."""

from __future__ import annotations

import re
from types import TracebackType

import torch.distributed as dist

from mmfsdp.errors import LostRankError, MmfsdpError

__all__ = ["Waiting", "is_lost", "lost_rank_error"]

_LOST = re.compile(r"gloo|nccl|timed? ?out|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE)


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error is what torch raises when another rank does not answer."""
    if not isinstance(error, RuntimeError) or isinstance(error, MmfsdpError):
        return False
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


class Waiting:
    """A context in which ranks communicate: errors of gloo and NCCL become a `LostRankError`.

    Args:
        doing: What this rank does, worded to follow "while": ``"gathering the shard unit 'blocks.0'"``.
    """

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lost(error):
            raise lost_rank_error(error, self._doing) from error


def lost_rank_error(error: BaseException, doing: str) -> LostRankError:
    """Return the error that says what this rank did when the others did not take part.

    Args:
        error: What torch raised.
        doing: See `Waiting`.
    """
    first_line = str(error).strip().partition("\n")[0]
    return LostRankError(
        f"The other ranks did not take part while this rank was {doing} ({first_line}). All ranks must run the same "
        "units equally often. Usual causes: ranks have different numbers of batches (let the sampler pad or drop: "
        "round_up=True, drop_last=True); only some ranks use a unit (exclude it in the wrap policy); a rank skipped "
        "its backward, as for a loss that is not finite (skip it on all ranks or on none); one rank alone made a call "
        "that every rank must make, such as clipping, saving or a forward; or another rank failed or was killed (see "
        "its own output).",
        rank=dist.get_rank(),
    )
