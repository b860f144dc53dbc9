"""What a conversion will write, decided before anything is: tensors, names, dtypes and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mmfsdp.basics.boxes import Ranks
from mmfsdp.checkpoint.conversion.optimizer_forms import states_by_name, states_by_place
from mmfsdp.checkpoint.conversion.renaming import NameRules
from mmfsdp.checkpoint.conversion.selection import Selection, select
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.files.casting import chosen_dtypes
from mmfsdp.checkpoint.files.planned_files import PlannedFile
from mmfsdp.checkpoint.formats.registry import Content, Format
from mmfsdp.checkpoint.geometry.views import CastEntry
from mmfsdp.checkpoint.layout import Layout, TensorEntry
from mmfsdp.checkpoint.tree import named_tensors, tensor_free_paths

__all__ = ["Intent", "intended"]


@dataclass(frozen=True)
class Intent:
    """A conversion that has been thought through."""

    format: str
    """What is written."""
    planned: Sequence[PlannedFile]
    """The files that will be written."""
    save_id: str
    """Identifies what is written."""
    world_size: int
    """Number of ranks that it will be of."""
    written: Mapping[str, TensorEntry]
    """Every tensor by the name that a reader of the target will know it by."""
    sources: tuple[str, ...]
    """The source's tensors that are read."""
    files: Mapping[str, int]
    """Bytes of tensor data by file."""
    renamed: Mapping[str, str]
    """Old names in the part that is kept, and new ones."""
    casts: Mapping[str, str]
    """New dtypes by name."""
    dropped: tuple[str, ...]
    """What is left out."""
    notes: tuple[str, ...]
    """What one should know."""


def intended(layout: Layout, target: Format, conversion: Conversion, *, overflow: Callable[[str, int], None]) -> Intent:
    """Decide what a conversion writes; touches no file.

    Args:
        layout: The source.
        target: The format to write.
        conversion: What to write; ``keep`` and, for formats with files per rank, ``ranks`` are filled in.
        overflow: Called with name and count where elements were too large for the dtype of a cast.

    Raises:
        ConfigError, FormatError: See ``convert``.
    """
    rules = NameRules(conversion.include, conversion.exclude, conversion.rename, conversion.strip_prefix)
    keep = conversion.keep or "model"
    ranks = Ranks.parse(1 if conversion.ranks is None else conversion.ranks)
    selection = select(layout, keep, conversion.drop, rules, use_ema=conversion.use_ema)
    if keep != "model":
        selection = _with_states(selection, layout, target)
    names = named_tensors(selection.part)
    stored = {name: layout.tensors[source] for name, source in names.items()}
    casts = chosen_dtypes(conversion.dtype, stored)
    named: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        count = _counter(name, overflow)
        named[name] = CastEntry.of(entry, casts[name], count) if name in casts else entry
    # What lies beside the part, such as tensors in `meta`, is written as it is.
    tree = selection.part if target.flat and keep == "model" else selection.tree
    tensors = {source: layout.tensors[source] for source in named_tensors(tree).values()}
    tensors |= {names[name]: entry for name, entry in named.items()}
    content = Content(tree, tensors, named, conversion.max_shard_size, ranks)
    dropped = selection.dropped
    if target.tensors_only:
        written: Mapping[str, TensorEntry] = named
        dropped += tuple(path for path in tensor_free_paths(tree) if tree.get(path) not in ({}, []))
    else:
        written = {name: tensors[source] for name, source in named_tensors(tree).items()}
    sources = tuple(names.values()) if target.tensors_only else tuple(tensors)
    planned = target.plan_write(content)
    return Intent(
        format=target.name,
        planned=planned,
        save_id=content.save_id,
        world_size=ranks.count if target.by_rank else 1,
        written=written,
        sources=sources,
        files={file.name: file.nbytes for file in planned if file.pieces or not file.name},
        renamed=rules.renames,
        casts=casts,
        dropped=dropped,
        notes=selection.notes,
    )


def _with_states(selection: Selection, layout: Layout, target: Format) -> Selection:
    """Give optimizer state the form that users of the target expect; a file of tensors alone keeps the source's."""
    if target.tensors_only:
        return selection
    if target.optimizer_names:
        tree, notes = states_by_name(selection.tree, layout)
    else:
        tree, notes = states_by_place(selection.tree), ()
    part = tree if selection.part is selection.tree else next(iter(tree.values()), selection.part)
    return replace(selection, tree=tree, part=part, notes=(*selection.notes, *notes))


def _counter(name: str, overflow: Callable[[str, int], None]) -> Callable[[str, int], None]:
    return lambda _, count: overflow(name, count)
