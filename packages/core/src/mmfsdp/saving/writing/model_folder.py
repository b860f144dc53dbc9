"""Writes a Hugging Face folder from all ranks: each writes its rows at their places in the files, without a gather.

The files are planned as ``convert`` plans them, from names, dtypes and shapes alone, which every rank knows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.failed_downloads import pointer_notes
from mmfsdp.checkpoint.files.atomic import refuse_other_content
from mmfsdp.checkpoint.files.copying import BlockWriter, reserve
from mmfsdp.checkpoint.files.disk import copy_here, sync
from mmfsdp.checkpoint.files.planned_files import complete_file
from mmfsdp.checkpoint.formats.common.source import Content
from mmfsdp.checkpoint.formats.huggingface.config_sizes import check_sizes
from mmfsdp.checkpoint.formats.huggingface.memory_names import (
    Located,
    boxes_in_files,
    model_on_meta,
    names_in_files,
)
from mmfsdp.checkpoint.formats.huggingface.model_folders import companions, like_folder, weights_stem
from mmfsdp.checkpoint.formats.huggingface.shard_indexes import plan_folder
from mmfsdp.checkpoint.formats.huggingface.weight_names import Ties, check_names, own_weights
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.integrity import crc32, crc32_combine
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, on_all_ranks, shared
from mmfsdp.runtime.dtensors import box_of, placements_of, whole_tensor
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.skeletons import bytes_of
from mmfsdp.saving.writing.summed_files import copy_into
from mmfsdp.saving.writing.written_parts import Stretch, WrittenParts, joined_on_first

__all__ = ["ModelFolder", "write_model_folder"]

_log = logging.getLogger("mmfsdp.saving")


@dataclass(frozen=True)
class ModelFolder:
    """The files that a folder will hold, and their content."""

    weights: Mapping[str, torch.Tensor]
    """The weights by name in memory, tied ones once: DTensors, or tensors that are the same on every rank."""
    entries: Mapping[str, TensorEntry]
    """What will be written, by name in the files."""
    boxes: Mapping[str, Located]
    """Which box of which weight a tensor of the files is; those of the same name in memory have none."""
    beside: Mapping[str, Path]
    """Files to copy, by name; only the first rank's counts."""
    stem: str
    """The prefix of the names of the files with weights."""

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Any],
        like: Path,
        target: Path,
        scope: Scope,
        *,
        overwrite: bool,
        model: nn.Module | None = None,
    ) -> ModelFolder:
        """Decide what to write. Collective: every rank of the scope.

        Args:
            weights: The sharded state dict.
            like: A Hugging Face folder of the same model.
            target: Where the folder will appear.
            scope: The ranks that save.
            overwrite: Whether the target is replaced; its other files are kept.
            model: The model: weights of one of transformers 5 get the names and shapes of its files.

        Raises:
            ConfigError: ``like`` is not such a folder, or its weights have other names or shapes, or its config other
                sizes; raised on every rank.
        """
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}

        def plan() -> tuple[Ties, list[tuple[str, str]], str, dict[str, Located], dict[str, TensorEntry]] | None:
            if not scope.is_first:
                return None
            folder = like_folder(str(like), target, target)
            own = own_weights(folder, open_layout)
            boxes, entries = _in_files({name: _entry(name, value) for name, value in tensors.items()}, own, model)
            found = Ties.of(folder, own)
            names = {box.name: name for name, box in boxes.items() if box.is_whole}
            same = [(names.get(one, one), names.get(two, two)) for one, two in _one_in_memory(tensors)]
            candidates = [*found.candidates(entries), *same] if found.possible else []
            return found, candidates, weights_stem(found.like), boxes, entries

        found, candidates, stem, boxes, entries = shared(plan, scope)
        names = {name: boxes[name].name if name in boxes else name for name in entries}
        dropped: set[str] = set()
        for second, first in candidates:
            if first in dropped or second in dropped or not {first, second} <= {*entries}:
                continue
            if any_of(scope, not torch.equal(_local(tensors[names[second]]), _local(tensors[names[first]]))):
                found.refuse_unequal(second, first)
            else:
                dropped.add(second)
        written = {name: entry for name, entry in entries.items() if name not in dropped}

        def check() -> dict[str, Path]:
            if not scope.is_first:
                return {}
            check_names(written, {*entries}, found.like, own_weights(found.like, open_layout))
            check_sizes(written, found.like)
            beside = companions(found.like, target if overwrite else None)
            refuse_other_content(target, beside)
            for note in pointer_notes(beside):
                _log.warning("Saving %r: %s.", str(target), note)
            return beside

        kept = {name: tensors[name] for name in dict.fromkeys(names[name] for name in written)}
        return cls(kept, written, boxes, on_all_ranks(check, scope), stem)


def _in_files(
    entries: dict[str, TensorEntry], own: Mapping[str, TensorEntry], model: nn.Module | None
) -> tuple[dict[str, Located], dict[str, TensorEntry]]:
    """Return which boxes of weights are written, and what is written by the names of files."""
    if model is None or (own and all(name in entries for name in own)):
        return {}, entries
    plain = model_on_meta(model)
    if plain is None:
        return {}, entries
    files = own or names_in_files(plain)
    boxes = boxes_in_files(plain, entries, files)
    taken = {box.name for box in boxes.values()}
    made = {name: entry for name, entry in entries.items() if name not in taken}
    return boxes, made | {
        name: TensorEntry(name, entries[box.name].dtype, files[name].shape, ()) for name, box in boxes.items()
    }


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
    planned = plan_folder(Content({}, folder.entries, folder.entries, stem=folder.stem))

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
    latest: tuple[str, tuple[torch.Tensor, Bounds] | None] = ("", None)
    writer = BlockWriter(direct=direct)
    for file in planned:
        path = save.temporary / file.name
        with ExitStack() as stack:
            with _collected(failures, save.target / file.name):
                stack.enter_context(writer.to(path))
            for piece in file.pieces:
                box = folder.boxes.get(piece.entry.name)
                name = piece.entry.name if box is None else box.name
                if name != latest[0]:  # the parts of a tensor follow each other: it is gathered once
                    latest = name, _own(folder.weights[name], scope)
                own = latest[1]
                if own is not None and box is not None:
                    own = _within(*own, box, piece.entry.shape)
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


def _within(
    tensor: torch.Tensor, held: Bounds, box: Located, shape: Sequence[int]
) -> tuple[torch.Tensor, Bounds] | None:
    """Return what a rank has of a box, and which rows of the tensor in the file that is."""
    low = [max(ours, its) for ours, its in zip(held[0], box.offsets, strict=True)]
    ends = zip(*held, box.offsets, box.sizes, strict=True)
    sizes = [min(a + b, c + d) - first for first, (a, b, c, d) in zip(low, ends, strict=True)]
    if min(sizes, default=1) <= 0:
        return None
    for dim, (first, size) in enumerate(zip(low, sizes, strict=True)):
        tensor = tensor.narrow(dim, first - held[0][dim], size)
    offsets = [first - begin for first, begin in zip(low, box.offsets, strict=True)]
    if (dropped := box.dropped(shape)) is not None:
        tensor = tensor.squeeze(dropped)
        del offsets[dropped], sizes[dropped]
    return tensor, (tuple(offsets), tuple(sizes))


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
