"""Exchanges the ranks' files between nodes, so that each has a copy on another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.collective.channels import host_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.nodes.files import NodeFile, exchange

__all__ = ["exchange_copies"]


def exchange_copies(
    own: NodeFile,
    to: int | None,
    sources: Sequence[int],
    common: Mapping[str, Any],
    directory: Path,
    scope: Scope,
    group: dist.ProcessGroup,
) -> list[NodeFile]:
    """Exchange files with the other nodes, and return the copies that this rank keeps now. Collective: every rank.

    Args:
        own: This rank's file.
        to: The rank that keeps its copy, if any.
        sources: The ranks of whose files this one keeps copies.
        common: What the descriptions of all files say.
        directory: The directory of this node.
        scope: The ranks.
        group: The same ranks, for the data.

    Raises:
        CorruptCheckpointError: A file changed on its way; raised on every rank.
        CheckpointError: A copy cannot be written; raised on every rank.
    """
    facts = torch.tensor([own.size, own.crc32])
    sent = None if to is None else dist.isend(facts, dist.get_global_rank(group, to), group=group)
    copies = []
    for owner in sources:
        told = torch.empty(2, dtype=torch.int64)
        dist.recv(told, dist.get_global_rank(group, owner), group=group)
        copies.append(NodeFile(owner=owner, size=int(told[0]), crc32=int(told[1]), **common))
    if sent is not None:
        sent.wait()

    with contextlib.ExitStack() as stack:

        def open_files() -> dict[int, tuple[int, IO[bytes]]]:
            with as_checkpoint_error(directory):
                return {copy.owner: (copy.size, stack.enter_context(_opened(copy, directory))) for copy in copies}

        outputs = on_all_ranks(open_files, scope)
        crcs, failure = exchange(own.path(directory), to, outputs, group)

        def check() -> None:
            with as_checkpoint_error(directory):
                if failure is not None:
                    raise failure
                for copy in copies:
                    if crcs[copy.owner] != copy.crc32:
                        raise CorruptCheckpointError(
                            f"The copy of rank {copy.owner}'s file changed on its way to host {host_of()!r}.",
                            file=str(copy.path(directory)),
                        )
                stack.pop_all().close()  # the files get their names

        on_all_ranks(check, scope)
    return copies


@contextlib.contextmanager
def _opened(copy: NodeFile, directory: Path) -> Iterator[IO[bytes]]:
    path = copy.path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(path, overwrite=True) as temporary, temporary.open("wb") as file:
        yield file
