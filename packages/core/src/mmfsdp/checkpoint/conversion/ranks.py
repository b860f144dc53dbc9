"""How many ranks a checkpoint is divided among, and which of them hold the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmfsdp.errors import ConfigError

__all__ = ["Ranks"]

_MOST = 65_536


@dataclass(frozen=True, slots=True)
class Ranks:
    """A mesh of ranks, by its two sizes: (replicate, shard), as hybrid sharding uses."""

    replicas: int
    """Groups of ranks that each hold everything."""
    shards: int
    """Ranks in a group; they divide every tensor's rows."""

    @classmethod
    def parse(cls, given: int | str) -> Ranks:
        """Return the mesh that ``8`` or ``'2x4'`` (two replicas of four shards) stands for.

        Raises:
            ConfigError: It is neither.
        """
        match = re.fullmatch(r"(?:(\d{1,7})x)?(\d{1,7})", str(given).strip())
        replicas, shards = (int(match[1] or 1), int(match[2])) if match else (0, 0)
        if not 1 <= replicas * shards <= _MOST:
            raise ConfigError(
                f"{given!r} is not a number of ranks. Write a number from 1 to {_MOST}, or text such as '2x4' for two "
                "replicas of four shards."
            )
        return cls(replicas, shards)

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def shard(self, rank: int) -> int:
        """Return which part of every tensor a rank holds."""
        return rank % self.shards
