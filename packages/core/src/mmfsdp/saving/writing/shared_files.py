"""Writes files that hold whole tensors from all ranks: each rank writes its parts at their offsets in the files.

Where the ranks do not see one file, or it goes to a store, they send what they hold to the first one, which writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint.files.disk import sync
from mmfsdp.checkpoint.files.planned_files import Stretch, complete_file
from mmfsdp.checkpoint.integrity import crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.collective.broadcasting import as_bytes
from mmfsdp.collective.channels import GlooChannel, naming_lost_ranks
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import box_of
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.pieces import Share, create, joined, live_names, write_pieces
from mmfsdp.saving.writing.replica_shares import written_boxes

__all__ = ["SCATTERED", "WrittenParts", "joined_on_first", "shares_of", "write_shared"]

SCATTERED = -1
"""Offset that stands for many, if a rank wrote a tensor in so many stretches that it tells only their length."""

WrittenParts = dict[str, list[Stretch]]
"""The written parts of each tensor; tensors without any are absent."""

_MOST = 64  # stretches of one tensor that a rank tells of; the checksum of one with more is taken from the file


def shares_of(tensors: Mapping[str, torch.Tensor], scope: Scope) -> dict[str, Share]:
    """Return what this rank holds of the DTensors among some tensors, and whether it writes it. Not collective.

    If several meshes have the same tensor, such as those of replicas, the one that the first rank belongs to writes it.

    Args:
        tensors: DTensors placed by ``Shard`` and ``Replicate``, and others, which the first rank writes; the same names
            on every rank.
        scope: The ranks that save; its channel is one of gloo.
    """
    first, found = _first_of(scope), {}
    written: dict[int, dict[int, int]] = {}
    for name, tensor in sorted(tensors.items()):  # replicas are chosen in the same order on every rank
        if not isinstance(tensor, DTensor):
            continue
        boxes, writes = written_boxes(tensor, written)
        ranks = tuple(int(rank) for rank in tensor.device_mesh.mesh.flatten())
        writes = writes and first in ranks and (tensor.dim() > 0 or scope.is_first)
        found[name] = Share(tensor.to_local(), boxes.shape, box_of(tensor).bounds, writes, boxes, ranks)
    return found


def _group_of(scope: Scope) -> dist.ProcessGroup:
    assert isinstance(scope.channel, GlooChannel)
    return scope.channel.group


def _first_of(scope: Scope) -> int:
    """Return the global rank of the first rank of a scope, whose channel is one of gloo."""
    return dist.get_global_rank(_group_of(scope), 0)


def write_shared(
    directory: Path,
    planned: Sequence[PlannedFile],
    shares: Mapping[str, Share],
    scope: Scope,
    *,
    target: Path,
    border: int = 0,
    alone: bool = False,
) -> dict[str, FileEntry]:
    """Write planned files. Collective: every rank of the scope.

    A rank holds a copy of one tensor's rows at a time if they are on a device.

    Args:
        directory: Where the files are written; the same on every rank.
        planned: The files, on the first rank; ignored on others. The first rank alone writes what is not made of live
            tensors.
        shares: What this rank holds of each live tensor.
        scope: The ranks that save; its channel is one of gloo.
        target: What is saved, for messages.
        border: Also take the checksum of every block of this many bytes; 0 takes none.
        alone: The first rank writes the parts that the others send.

    Returns:
        On the first rank size and checksums of all files, by name; on others nothing.

    Raises:
        CheckpointError: A file could not be written; raised on every rank.
        LostRankError: A rank is gone.
    """

    def lay_out() -> list[_File]:  # what others need of the plan
        if not scope.is_first:
            return []
        with as_checkpoint_error(target):
            for file in planned:
                create(directory / file.name, file.size)
        return [(file.name, [piece for piece in file.pieces if live_names(piece.entry)]) for file in planned]

    others = [[piece for piece in file.pieces if not live_names(piece.entry)] for file in planned]
    files = broadcast_object(scope, on_all_ranks(lay_out, scope))
    on_all_ranks(lambda: _check_known(files, shares), scope)
    own: WrittenParts = {}
    failures: list[BaseException] = []
    for index, (name, live) in enumerate(files):
        with naming_lost_ranks("ranks sent their shards to the first one") if alone else nullcontext():
            pieces = _pieces_alone(live, shares, scope) if alone else _own_pieces(live, shares)
            if scope.is_first or not alone:
                only: list[_Held] = [(piece, {}) for piece in others[index]] if scope.is_first else []
                with _collected(failures, target / name):
                    own |= _write(directory / name, chain(only, pieces), border)
            for _ in pieces:  # otherwise ranks that send would never return
                pass

    def succeed() -> None:
        for failure in failures:
            raise failure

    on_all_ranks(succeed, scope)
    written = own if alone else joined_on_first(own, scope, border)

    def complete() -> dict[str, FileEntry]:
        if not scope.is_first:
            return {}
        assert written is not None
        with as_checkpoint_error(target):
            return {file.name: _completed(directory / file.name, file, written, border) for file in planned}

    return on_all_ranks(complete, scope)


_File = tuple[str, list[Piece]]  # its name, and the pieces that are made of live tensors


def _check_known(files: Iterable[_File], shares: Mapping[str, Share]) -> None:
    for name in (name for _, pieces in files for piece in pieces for name in live_names(piece.entry)):
        if name not in shares:
            raise StateDictError(f"{name!r} is saved by rank 0, and is not on this rank. Save the same on every rank.")


@contextmanager
def _collected(failures: list[BaseException], path: Path) -> Iterator[None]:
    try:
        with as_checkpoint_error(path):
            yield
    except Exception as error:
        failures.append(error)


_Held = tuple[Piece, Mapping[str, Share]]


def _own_pieces(pieces: Iterable[Piece], shares: Mapping[str, Share]) -> Iterator[_Held]:
    for piece in pieces:
        own = {name: shares[name] for name in live_names(piece.entry) if shares[name].writes}
        if own:
            yield piece, own


def _pieces_alone(pieces: Iterable[Piece], shares: Mapping[str, Share], scope: Scope) -> Iterator[_Held]:
    """Send what this rank writes to the first one, and there yield all pieces. Collective: every rank of the scope."""
    group, first, own = _group_of(scope), _first_of(scope), dist.get_rank()
    memory = torch.empty(0, dtype=torch.uint8)
    for piece, name in ((each, name) for each in pieces for name in live_names(each.entry)):
        share = shares[name]
        assert share.boxes is not None
        held = sorted(share.boxes.meeting(None).items()) if first in share.ranks else ()
        for box, rank in ((box, share.ranks[index]) for box, index in held):
            if rank == own != first:
                dist.send(as_bytes(share.tensor.detach().cpu().contiguous()), first, group=group)
            elif rank == own:
                yield piece, {name: replace(share, writes=True)}
            elif scope.is_first:
                size = math.prod(box[1]) * share.tensor.element_size()
                memory = memory if len(memory) >= size else torch.empty(size, dtype=torch.uint8)
                dist.recv(memory[:size], rank, group=group)
                received = memory[:size].view(share.tensor.dtype).reshape(box[1])
                yield piece, {name: Share(received, share.shape, box)}


def _write(path: Path, pieces: Iterable[_Held], border: int) -> WrittenParts:
    found: WrittenParts = {}
    for piece, stretches in write_pieces(path, pieces, border=border):
        found.setdefault(piece.entry.name, []).extend(stretches)
    if not border:
        found = {name: _told(stretches) for name, stretches in found.items()}
    sync(path)
    return found


def _told(stretches: list[Stretch]) -> list[Stretch]:
    return stretches if len(stretches) <= _MOST else [(SCATTERED, sum(length for _, length, _ in stretches), 0)]


def _completed(path: Path, file: PlannedFile, written: WrittenParts, border: int) -> FileEntry:
    data: list[Stretch] = []
    crcs = []
    for piece in file.pieces:
        stretches = sorted(written.get(piece.entry.name, ()))
        if stretches and stretches[0][0] == SCATTERED:
            count = sum(length for _, length, _ in stretches)
            assert count == piece.entry.nbytes, f"{piece.entry.name} has {count} bytes"
            stretches = [_read_again(path, piece)]
        crcs.append(joined(piece, stretches))
        data += stretches
    entry = complete_file(path, file, crcs, data if border else None)
    sync(path)
    return entry


def _read_again(path: Path, piece: Piece) -> Stretch:
    """Return the checksum of a piece that ranks wrote in many stretches, from the file."""
    end = piece.at + piece.entry.nbytes
    with path.open("rb", buffering=0) as file:
        crc, stop = crc32_of_stretch(file.fileno(), piece.at, end)
    assert stop == end, f"{path.name} ends at {stop}"
    return piece.at, piece.entry.nbytes, crc


def joined_on_first(own: WrittenParts, scope: Scope, border: int = 0) -> WrittenParts | None:
    """Return what all ranks wrote on the first rank, and None on the others. Collective: every rank of the scope.

    Every other rank sends one message. Rows that follow each other become one stretch on the way. So each rank receives
    at most log2(ranks) messages, whose size depends on the number of tensors, not of ranks.

    Args:
        own: What this rank wrote.
        scope: The ranks.
        border: Keep stretches apart at every multiple of this many bytes of the file, so that messages grow with the
            file; 0 joins all.
    """
    joined, step = own, 1
    while step < scope.size:
        if scope.rank % (2 * step):
            scope.channel.send(joined, scope.rank - step)
            return None
        if scope.rank + step < scope.size:
            joined = _merged(joined, scope.channel.receive(scope.rank + step), border)
        step *= 2
    return joined


def _merged(one: WrittenParts, two: WrittenParts, border: int) -> WrittenParts:
    return {name: _adjoining([*one.get(name, ()), *two.get(name, ())], border) for name in {**one, **two}}


def _adjoining(stretches: Iterable[Stretch], border: int) -> list[Stretch]:
    found: list[Stretch] = []
    for begin, length, crc in sorted(stretches):
        start, before, own = found[-1] if found else (0, 0, 0)
        if found and SCATTERED == start == begin:
            found[-1] = start, before + length, 0
        elif found and start != SCATTERED and start + before == begin and not (border and begin % border == 0):
            found[-1] = start, before + length, crc32_combine(own, crc, length)
        else:
            found.append((begin, length, crc))
    return found
