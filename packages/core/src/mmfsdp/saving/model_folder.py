"""Writes a Hugging Face folder from all ranks: each writes its rows at their places in the files, without a gather.

The files are planned as ``convert`` plans them, from names, dtypes and shapes alone, which every rank knows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.failed_downloads import pointer_notes
from mmfsdp.checkpoint.files.atomic import refuse_other_content
from mmfsdp.checkpoint.files.copying import BlockWriter, reserve
from mmfsdp.checkpoint.files.disk import copy_here, sync
from mmfsdp.checkpoint.files.planned_files import complete_file
from mmfsdp.checkpoint.formats.huggingface.config_sizes import check_sizes
from mmfsdp.checkpoint.formats.huggingface.folder_weights import plan_write
from mmfsdp.checkpoint.formats.huggingface.model_folders import companions, like_folder, weights_stem
from mmfsdp.checkpoint.formats.huggingface.weight_names import Ties, check_names, own_weights
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.formats.source import Content
from mmfsdp.checkpoint.integrity import crc32, crc32_combine
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, on_all_ranks, shared
from mmfsdp.runtime.dtensors import box_of, placements_of, whole_tensor
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.publishing import DirectorySave, Files
from mmfsdp.saving.skeletons import bytes_of
from mmfsdp.saving.summed_files import copy_into
from mmfsdp.saving.written_parts import Stretch, WrittenParts, joined_on_first

__all__ = ["ModelFolder", "write_model_folder"]

_log = logging.getLogger("mmfsdp.saving")


@dataclass(frozen=True)
class ModelFolder:
    """The files that a folder will hold, and their content."""

    weights: Mapping[str, torch.Tensor]
    """The weights by name, tied ones once: DTensors, or tensors that are the same on every rank."""
    beside: Mapping[str, Path]
    """Files to copy, by name; only the first rank's counts."""
    stem: str
    """The prefix of the names of the files with weights."""

    @classmethod
    def of(cls, weights: Mapping[str, Any], like: Path, target: Path, scope: Scope, *, overwrite: bool) -> ModelFolder:
        """Decide what to write. Collective: every rank of the scope.

        Args:
            weights: The sharded state dict.
            like: A Hugging Face folder of the same model.
            target: Where the folder will appear.
            scope: The ranks that save.
            overwrite: Whether the target is replaced; its other files are kept.

        Raises:
            ConfigError: ``like`` is not such a folder, or its weights have other names or shapes, or its config other
                sizes; raised on every rank.
        """
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        entries = {name: _entry(name, value) for name, value in tensors.items()}

        def ties() -> tuple[Ties, list[tuple[str, str]], str] | None:
            if not scope.is_first:
                return None
            folder = like_folder(str(like), target, target)
            found = Ties.of(folder, own_weights(folder, open_layout))
            candidates = [*found.candidates(entries), *_one_in_memory(tensors)] if found.possible else []
            return found, candidates, weights_stem(found.like)

        found, candidates, stem = shared(ties, scope)
        dropped: set[str] = set()
        for second, first in candidates:
            if first in dropped or second in dropped:
                continue
            if any_of(scope, not torch.equal(_local(tensors[second]), _local(tensors[first]))):
                found.refuse_unequal(second, first)
            else:
                dropped.add(second)
        kept = {name: value for name, value in tensors.items() if name not in dropped}

        def check() -> dict[str, Path]:
            if not scope.is_first:
                return {}
            written = {name: entries[name] for name in kept}
            check_names(written, {*tensors}, found.like, own_weights(found.like, open_layout))
            check_sizes(written, found.like)
            beside = companions(found.like, target if overwrite else None)
            refuse_other_content(target, beside)
            for note in pointer_notes(beside):
                _log.warning("Saving %r: %s.", str(target), note)
            return beside

        return cls(kept, on_all_ranks(check, scope), stem)


def write_model_folder(save: DirectorySave, folder: ModelFolder, scope: Scope, *, direct: bool = False) -> Files:
    """Write the files of a folder. Collective: every rank of the scope.

    Tensors are written one after the other. A rank holds a copy of its own rows of one tensor at a time; one that is
    not divided by rows, as with tensor parallelism, is gathered and written by the first rank.

    Args:
        save: The save that the files belong to.
        folder: What to write.
        scope: The ranks that save.
        direct: Write past the page cache, where that helps.

    Returns:
        On the first rank all files with weights; on others none.

    Raises:
        CheckpointError: A file could not be written; raised on every rank.
    """
    entries = {name: _entry(name, value) for name, value in folder.weights.items()}
    planned = plan_write(Content({}, entries, entries, stem=folder.stem))

    def create() -> None:
        with as_checkpoint_error(save.target):
            if scope.is_first:
                for file in planned:
                    with (save.temporary / file.name).open("xb") as created:
                        reserve(created.fileno(), file.size)
                for name, origin in folder.beside.items():
                    copy_here(origin, save.temporary / name)
                    sync(save.temporary / name)

    on_all_ranks(create, scope)
    written: WrittenParts = {}
    failures: list[BaseException] = []
    writer = BlockWriter(direct=direct)
    for file in planned:
        path = save.temporary / file.name
        with ExitStack() as stack:
            with _collected(failures, save.target / file.name):
                stack.enter_context(writer.to(path))
            for piece in file.pieces:
                own = _own(folder.weights[piece.entry.name], scope)
                # A rank that failed goes on with what is collective, or the others would wait for it.
                with _collected(failures, save.target / file.name):
                    if own is not None and not failures and (stretch := _write(writer, *own, piece)) is not None:
                        written[piece.entry.name] = [stretch]
            with _collected(failures, save.target / file.name):
                stack.close()
                sync(path)

    def succeed() -> None:
        for failure in failures:
            raise failure

    on_all_ranks(succeed, scope)
    parts = joined_on_first(written, scope)

    def complete() -> Files:
        if parts is None:
            return {}
        with as_checkpoint_error(save.target):
            return {file.name: _completed(save.temporary / file.name, file, parts) for file in planned}

    return on_all_ranks(complete, scope)


@contextmanager
def _collected(failures: list[BaseException], path: Path) -> Iterator[None]:
    try:
        with as_checkpoint_error(path):
            yield
    except Exception as error:
        failures.append(error)


def _own(tensor: torch.Tensor, scope: Scope) -> tuple[torch.Tensor, Bounds] | None:
    """Return what this rank writes of a tensor, and which box that is. Collective, if it is not divided by rows."""
    if not isinstance(tensor, DTensor):
        return (tensor, ((0,) * tensor.dim(), tuple(tensor.shape))) if scope.is_first else None
    coordinates = tuple(tensor.device_mesh.get_coordinate() or ())
    by_rows = all(type(place).__name__ in ("Shard", "Replicate") for place in tensor.placements) and all(
        dim in (0, None) for dim in placements_of(tensor)
    )
    if not by_rows or not tensor.dim():
        with Waiting("gathering a tensor that is not divided by rows"):
            whole = whole_tensor(tensor)
        return (whole, ((0,) * whole.dim(), tuple(whole.shape))) if scope.is_first else None
    if any(at for at, dim in zip(coordinates, placements_of(tensor), strict=True) if dim is None):
        return None  # the first replica writes
    return tensor.to_local(), box_of(tensor).bounds


def _write(writer: BlockWriter, tensor: torch.Tensor, box: Bounds, piece: Piece) -> Stretch | None:
    """Write rows of a tensor, and return where they went."""
    if not tensor.numel():
        return None
    offsets, _ = box
    row = math.prod(piece.entry.shape[1:]) * tensor.element_size()
    begin = at = piece.at + (offsets[0] * row if offsets else 0)
    data, crc = bytes_of(tensor.detach().cpu().contiguous()), 0
    while data:
        room = writer.room(at, len(data))
        copy_into(room, data[: len(room)])
        crc = crc32(room, crc)
        writer.filled(len(room))
        data, at = data[len(room) :], at + len(room)
    return begin, at - begin, crc


def _completed(path: Path, file: PlannedFile, parts: WrittenParts) -> Any:
    crcs = []
    for piece in file.pieces:
        crc, end = 0, piece.at
        for position, length, own in parts.get(piece.entry.name, ()):
            assert position == end, f"{piece.entry.name} is written at {position}, expected {end}"
            crc, end = crc32_combine(crc, own, length), position + length
        assert end == piece.at + piece.entry.nbytes, piece.entry.name
        crcs.append(crc)
    entry = complete_file(path, file, crcs)
    sync(path)
    return entry


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(name, canonical_dtype(tensor.dtype), tuple(tensor.shape), ())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _one_in_memory(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the later names of tensors that are one in memory, each with the first name.

    It is for the first rank, which holds rows of every tensor.
    """
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    pairs = []
    for name, tensor in tensors.items():
        local = _local(tensor)
        first = seen.setdefault((local.data_ptr(), tuple(tensor.shape)), name)
        if local.numel() and first != name:
            pairs.append((name, first))
    return pairs
