"""Writes a live model's weights alone, from all ranks, in the formats that libraries load: plans as ``convert`` does.

The first rank plans from names, dtypes and shapes; each rank writes its rows where they belong in the files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.failed_downloads import pointer_notes
from mmfsdp.checkpoint.files.atomic import refuse_other_content
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.disk import copy_here, sync
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.formats.huggingface.config_sizes import check_sizes
from mmfsdp.checkpoint.formats.huggingface.memory_names import as_in_files, model_on_meta, names_in_files
from mmfsdp.checkpoint.formats.huggingface.model_folders import like_folder, weights_stem
from mmfsdp.checkpoint.formats.huggingface.weight_names import Ties, check_names, own_weights
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.layout import PlannedFile
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, on_all_ranks, shared
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.memory import entry_in_memory, live_entry
from mmfsdp.saving.writing.pieces import live_names
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.shared_files import shares_of, write_shared

__all__ = ["ModelFiles", "write_model_folder"]

_log = logging.getLogger("mmfsdp.saving")


@dataclass(frozen=True)
class ModelFiles:
    """The files that will hold a model's weights."""

    weights: Mapping[str, torch.Tensor]
    """The weights by name in memory, tied ones once: DTensors, or tensors that are the same on every rank."""
    planned: Sequence[PlannedFile]
    """On the first rank: the files."""
    beside: Mapping[str, Path]
    """On the first rank: files to copy, by name."""

    @classmethod
    def of(
        cls,
        weights: Mapping[str, torch.Tensor],
        kind: Format,
        target: Path,
        scope: Scope,
        *,
        like: Path | None,
        overwrite: bool,
        model: nn.Module | None = None,
    ) -> ModelFiles:
        """Decide what to write. Collective: every rank of the scope.

        Args:
            weights: The sharded state dict; tensors only.
            kind: The format.
            target: Where the file or folder will appear.
            scope: The ranks that save.
            like: A Hugging Face folder of the same model, for formats that need one.
            overwrite: Whether the target is replaced; the other files of a folder are kept.
            model: The model: with ``like``, weights of one of transformers 5 get the names and shapes of its files.

        Raises:
            ConfigError: ``like`` is not such a folder, or its weights have other names or shapes, or its config other
                sizes, or the format cannot hold the weights; raised on every rank.
        """
        entries: dict[str, TensorEntry] = {}  # on the first rank, by name in the files

        def name() -> tuple[Ties | None, list[tuple[str, str, str, str]]] | None:
            if not scope.is_first:
                return None
            found = {name: _entry(name, tensor) for name, tensor in weights.items()}
            if like is None:
                entries.update(found)
                return None, []
            folder = like_folder(str(like), target, target)
            own = own_weights(folder, open_layout)
            entries.update(_in_files(found, own, model))
            ties = Ties.of(folder, own)
            return ties, [*_candidates(ties, entries, weights)]

        ties, candidates = shared(name, scope)
        dropped: dict[str, str] = {}
        for second, first, *held in candidates:
            if first in dropped or second in dropped:
                continue
            one, two = (_local(weights[name]) for name in held)
            if any_of(scope, not torch.equal(one, two)):
                assert ties is not None
                ties.refuse_unequal(second, first)
            else:
                dropped[second] = held[0]

        def plan() -> tuple[list[PlannedFile], dict[str, Path]]:
            if not scope.is_first:
                return [], {}
            written = {name: entry for name, entry in entries.items() if name not in dropped}
            return _planned(written, {*entries}, kind, ties, target, overwrite)

        planned, beside = on_all_ranks(plan, scope)
        kept = {name: tensor for name, tensor in weights.items() if name not in dropped.values()}
        return cls(kept, planned, beside)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    if isinstance(tensor, DTensor):
        return live_entry(name, tensor)
    return entry_in_memory(name, tensor, tensor.shape, ((0,) * tensor.dim(), tuple(tensor.shape)))


def _in_files(
    entries: dict[str, TensorEntry], own: Mapping[str, TensorEntry], model: nn.Module | None
) -> dict[str, TensorEntry]:
    """Return the entries to write, by their names in the files."""
    if model is None or (own and all(name in entries for name in own)):
        return entries
    plain = model_on_meta(model)
    return entries if plain is None else as_in_files(plain, entries, own or names_in_files(plain)) or entries


def _candidates(
    ties: Ties, entries: Mapping[str, TensorEntry], weights: Mapping[str, torch.Tensor]
) -> list[tuple[str, str, str, str]]:
    """Return pairs of names in the files that may be one weight, each with the names in memory."""
    held = {name: _name_in_memory(name, entry, weights) for name, entry in entries.items()}
    in_files = {memory: name for name, memory in held.items() if memory is not None}
    same = [(in_files.get(one), in_files.get(two)) for one, two in _one_in_memory(weights)]
    pairs = [*ties.candidates(entries), *same] if ties.possible else []
    return [
        (second, first, one, two)
        for second, first in pairs
        if second is not None and first is not None
        if (one := held[second]) is not None and (two := held[first]) is not None
    ]


def _name_in_memory(name: str, entry: TensorEntry, weights: Mapping[str, torch.Tensor]) -> str | None:
    """Return which weight a tensor of the files is; None if it is part of one, or made of several."""
    names = live_names(entry) or [name]
    is_whole = len(names) == 1 and names[0] in weights and weights[names[0]].numel() == entry.numel
    return names[0] if is_whole else None


def _planned(
    written: dict[str, TensorEntry], known: set[str], kind: Format, ties: Ties | None, target: Path, overwrite: bool
) -> tuple[list[PlannedFile], dict[str, Path]]:
    form = kind.model_form(None if ties is None else str(ties.like), target, target)
    stem = "model"
    if kind.directory and ties is not None:
        check_names(written, known, ties.like, own_weights(ties.like, open_layout))
        check_sizes(written, ties.like)
        stem = weights_stem(ties.like)
    elif (made := form.named(written, open_layout)) is not None:
        written = dict(made.tensors)
    for name, dtype in form.dtypes({}, written).items():
        written[name] = CastEntry.of(written[name], dtype, _ignore)
    finished = form.finished(written, None, lambda name, count: None)
    beside = dict(form.companions(target if overwrite else None))
    if kind.directory:
        refuse_other_content(target, beside)
    for note in (*pointer_notes(beside), *finished.notes):
        _log.warning("Saving %r: %s.", str(target), note)
    content = CheckpointContent({}, finished.tensors, finished.tensors, keys=dict(finished.keys), stem=stem)
    return kind.plan_write(content), beside


def _ignore(_: int) -> None:
    """Vectors become float32, which holds all values of the dtypes that they have."""


def write_model_folder(save: DirectorySave, files: ModelFiles, scope: Scope) -> Files:
    """Write the files of a folder. Collective: every rank of the scope.

    Args:
        save: The save that the files belong to.
        files: What to write.
        scope: The ranks that save.

    Returns:
        On the first rank all files with weights; on others none.

    Raises:
        CheckpointError: A file could not be written; raised on every rank.
    """

    def copy() -> None:
        with as_checkpoint_error(save.target):
            for name, origin in files.beside.items():
                copy_here(origin, save.temporary / name)
                sync(save.temporary / name)

    on_all_ranks(copy, scope)
    shares = shares_of(files.weights, scope)
    return write_shared(save.temporary, files.planned, shares, scope, target=save.target)


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
