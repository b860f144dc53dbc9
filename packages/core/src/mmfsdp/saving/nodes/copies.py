"""Sends the ranks' files between nodes: each to the node that keeps its copy, and back to where it is needed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.collective.channels import host_of, naming_lost_ranks
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.nodes.files import NodeFile, Transfer, path_of

__all__ = ["exchange_copies", "transfer"]

_CHUNK = 8 << 20  # bytes that are under way at once


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
        crcs, failure = _exchange(own.path(directory), to, outputs, group)

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


def _exchange(
    own: Path, to: int | None, sources: Mapping[int, tuple[int, IO[bytes]]], group: dist.ProcessGroup
) -> tuple[dict[int, int], OSError | None]:
    """Send a file to one rank while receiving files of others. Collective: all ranks that send.

    Args:
        own: This rank's file.
        to: The rank in the group that keeps its copy, if any.
        sources: The size of each file that this rank receives, by the rank that sends it, and where it is written.
        group: The ranks.

    Returns:
        The CRC-32 of each file that came, and the error if one could not be written: all of it is received even so.
    """
    crcs, left = dict.fromkeys(sources, 0), {source: size for source, (size, _) in sources.items()}
    failure: OSError | None = None
    with naming_lost_ranks("ranks exchanged copies of their files"):
        chunks = _chunks(own) if to is not None else iter(())
        while True:
            chunk = next(chunks, None)
            sending = None
            if chunk is not None:
                assert to is not None
                sending = dist.isend(chunk, dist.get_global_rank(group, to), group=group)
            for source in [source for source, size in left.items() if size]:
                received = torch.empty(min(_CHUNK, left[source]), dtype=torch.uint8)
                dist.recv(received, dist.get_global_rank(group, source), group=group)
                left[source] -= received.numel()
                data = received.numpy().data
                crcs[source] = crc32(data, crcs[source])
                try:
                    sources[source][1].write(data)
                except OSError as error:  # the rest must be received, or its sender would wait
                    failure = error
            if sending is not None:
                sending.wait()
            if chunk is None and not any(left.values()):
                break
    return crcs, failure


def transfer(step: int, directory: Path, plan: Sequence[Transfer], rank: int, group: dist.ProcessGroup) -> None:
    """Send files of a step where they are needed, one after the other. Collective: the ranks that the plan names.

    A rank that fails goes on, so that none waits for it, and raises at the end.

    Args:
        step: The step.
        directory: The node's directory.
        plan: What `plan_transfers` returned.
        rank: This rank.
        group: The ranks.

    Raises:
        CorruptCheckpointError: A copy is damaged, or gone.
        OSError: A file cannot be written.
    """
    failures: list[Exception] = []
    for holder, receiver, owner in plan:
        path = path_of(directory, owner, step)
        if rank == holder:
            _send(path, receiver, group)
        elif rank == receiver:
            try:
                _receive(path, holder, group)
            except (OSError, CorruptCheckpointError) as error:
                failures.append(error)
    for failure in failures:
        raise failure


def _send(path: Path, receiver: int, group: dist.ProcessGroup) -> None:
    described = None
    with contextlib.suppress(OSError, ValueError):
        described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        path.open("rb").close()
    with naming_lost_ranks("ranks exchanged copies of their files"):
        dist.send_object_list([described], dist.get_global_rank(group, receiver), group=group)
    if described is not None:
        _exchange(path, receiver, {}, group)


def _receive(path: Path, holder: int, group: dist.ProcessGroup) -> None:
    told = [None]
    with naming_lost_ranks("ranks exchanged copies of their files"):
        dist.recv_object_list(told, dist.get_global_rank(group, holder), group=group)
    if told[0] is None:
        raise CorruptCheckpointError(f"The copy on the node of rank {holder} is gone.", file=str(path))
    found = NodeFile(**told[0])
    with contextlib.ExitStack() as stack:
        failure: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(atomic_output(path, overwrite=True))
            output = stack.enter_context(temporary.open("wb"))
        except OSError as error:
            failure, output = error, stack.enter_context(Path(os.devnull).open("wb"))
        crcs, unwritten = _exchange(path, None, {holder: (found.size, output)}, group)
        if (failure := failure or unwritten) is not None:
            raise failure
        if crcs[holder] != found.crc32:
            raise CorruptCheckpointError(f"The copy on the node of rank {holder} is damaged.", file=str(path))
    found.describe(path.parents[1])


def _chunks(path: Path) -> Iterator[torch.Tensor]:
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)
