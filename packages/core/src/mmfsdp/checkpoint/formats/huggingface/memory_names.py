"""The one table of the names and shapes that weights have in files and in memory: transformers', for its models.

transformers 5 lists how ``from_pretrained`` converts the weights of files. Neither it nor torch needs to be installed:
without them, no model is known here.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.codes import other_codes, scales_of
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.huggingface.model_folders import CONFIG
from mmfsdp.checkpoint.recipes.rearranging import Pattern, fused, split, stacked
from mmfsdp.checkpoint.recipes.stand_in_files import StandIns
from mmfsdp.errors import CheckpointError, ConfigError

__all__ = [
    "Located",
    "as_in_files",
    "as_in_memory",
    "boxes_in_files",
    "described_model",
    "locate",
    "model_on_meta",
    "names_in_files",
]

_Converter = Any
"""A ``WeightConverter`` of transformers: patterns of names in files and in memory, and the operations between."""


class Located(NamedTuple):
    """The box of a tensor in memory that holds a tensor of a file."""

    name: str
    """The name of the tensor in memory."""
    whole: tuple[int, ...]
    """Its shape."""
    offsets: tuple[int, ...]
    """Where the box begins."""
    sizes: tuple[int, ...]
    """Its size; experts that are stacked in memory have one dimension less in files."""

    @property
    def is_whole(self) -> bool:
        """Whether the box is all of the tensor."""
        return self.sizes == self.whole

    def dropped(self, shape: Sequence[int]) -> int | None:
        """Return the dimension that a tensor of a file lacks; None if it has all."""
        if len(shape) == len(self.sizes):
            return None
        cuts = [(*self.sizes[:dim], *self.sizes[dim + 1 :]) for dim in range(len(self.sizes))]
        return cuts.index(tuple(shape))


def model_on_meta(model: Any) -> Any | None:
    """Return a model of transformers as its class makes it, on the meta device; None for any other model.

    The names of classes decide on conversions, and engines give modules other classes, or wrap them.

    Args:
        model: A module, which may be sharded.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    if not isinstance(model, transformers.PreTrainedModel):
        model = getattr(model, "module", model)  # engine fsdp1 wraps it
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    own = next(each for each in type(model).__mro__ if not each.__module__.startswith(("torch.", "mmfsdp.")))
    return _built(own, copy.deepcopy(model.config))


def described_model(folder: Path) -> Any | None:
    """Return the model that the ``config.json`` of a folder describes, on the meta device; no code in the folder runs.

    Returns:
        The model; None if there is no such file, or no transformers 5, or it does not know the model.
    """
    if not (folder / CONFIG).is_file():
        return None
    try:
        transformers = importlib.import_module("transformers")
        if int(transformers.__version__.split(".")[0]) < 5:  # whose models have the names of files
            return None
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it warns about the config when the folder is loaded
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            return _built(getattr(transformers, config.architectures[0]), config)
        finally:
            transformers.logging.set_verbosity(verbosity)
    except Exception:  # transformers may raise anything, and may itself be broken
        return None


def _built(kind: Any, config: Any) -> Any | None:
    torch = importlib.import_module("torch")
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]), torch.device("meta"):
            return kind(config)
    except Exception:  # whatever a class of the user raises: the conversions are then not known
        return None


def as_in_memory(model: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry] | None:
    """Return weights as transformers' ``from_pretrained`` names and shapes them. It reads no data.

    Args:
        model: What `model_on_meta` or `described_model` returned.
        tensors: The weights as a file names them.

    Returns:
        The weights; None if this release of transformers lists no conversions, or these rearrange weights in a way that
        is not known here, or codes.
    """
    if scales_of(tensors) or other_codes(tensors):
        return None
    own = model.state_dict()
    renamed = _renamed(model, own, tensors)
    if renamed is None:
        return None
    stand_ins = StandIns()
    made: dict[str, TensorEntry] = {}
    groups: defaultdict[str, defaultdict[str, list[TensorEntry]]] = defaultdict(lambda: defaultdict(list))
    converters: dict[str, _Converter] = {}
    for name, (target, pattern, converter) in renamed.items():
        if converter is not None:
            groups[target][pattern].append(stand_ins.of(tensors[name]))
            converters[target] = converter
        elif target in made:
            return None
        else:
            made[target] = stand_ins.of(tensors[name])
    for target, parts in groups.items():
        converted = _converted(target, parts, converters[target], own)
        if converted is None or {*converted} & {*made}:
            return None
        made |= converted
    try:
        return {name: replace(stand_ins.resolved(entry), name=name) for name, entry in made.items()}
    except ConfigError:  # computed and stored parts, mixed
        return None


def _renamed(model: Any, own: Mapping[str, Any], names: Iterable[str]) -> dict[str, tuple[str, str, _Converter]] | None:
    """Return for each name its name in memory, and the pattern and converter that take its tensor, if any."""
    try:
        from_files = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        transforms: list[Any] = from_files.get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if not isinstance(each, loading.WeightRenaming)]
        taken_by = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix = model.base_model_prefix
        renamed: dict[str, tuple[str, str, _Converter]] = {}
        for name in sorted(names, key=_natural):
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
            if target not in own and name in own:  # it is in memory as it is in files
                target, pattern = name, None
            renamed[name] = (target, pattern or "", taken_by.get(pattern))
        return renamed
    except (ImportError, AttributeError, TypeError):
        return None  # transformers 4, whose models have the names of files; or a release whose table is another


def _converted(
    target: str, parts: Mapping[str, Sequence[TensorEntry]], converter: _Converter, own: Mapping[str, Any]
) -> dict[str, TensorEntry] | None:
    """Return the tensors, by name, that a converter makes of those its patterns took; None if that is unknown here."""
    order = [pattern for pattern in converter.source_patterns if pattern in parts]
    targets = [*converter.target_patterns]
    if order != [*converter.source_patterns] or (len(targets) > 1 and targets[0] not in target):
        return None
    lists = [parts[pattern] for pattern in order]
    try:
        for operation in converter.operations:
            kind = type(operation).__name__
            if kind == "MergeModulelist":
                lists = [[stacked(target, each, operation.dim)] for each in lists]
            elif kind == "Concatenate":
                lists = [[fused(target, [entry for each in lists for entry in each], operation.dim)]]
            elif kind == "Chunk" and len(lists) == 1 and len(lists[0]) == 1:
                whole = lists[0][0]
                sizes = [whole.shape[operation.dim] // len(targets)] * len(targets)
                names = [target.replace(targets[0], each) for each in targets]
                lists = [[entry] for entry in split(whole, names, operation.dim, sizes)]
            elif kind == "Split" and len(lists) == 1 and len(lists[0]) == 1:
                names = [target.replace(targets[0], each) for each in targets]
                sizes = [own[name].shape[operation.dim] for name in names]
                lists = [[entry] for entry in split(lists[0][0], names, operation.dim, sizes)]
            elif kind == "Transpose" and len(targets) == 1 and len(lists) == 1 and len(lists[0]) == 1:
                lists = [[_transposed(lists[0][0], operation, tuple(own[target].shape))]]
            else:
                return None
    except (KeyError, ValueError):  # they do not fit together
        return None
    if len(lists) != len(targets) or any(len(each) != 1 for each in lists):
        return None
    names = [target.replace(targets[0], each) for each in targets]
    return {name: entry for name, [entry] in zip(names, lists, strict=True)}


def _transposed(entry: TensorEntry, operation: Any, wanted: tuple[int, ...]) -> TensorEntry:
    if operation.check_dims and entry.shape == wanted:
        return entry
    axes = [f"a{dim}" for dim in range(len(entry.shape))]
    left = " ".join(axes)
    axes[operation.dim0], axes[operation.dim1] = axes[operation.dim1], axes[operation.dim0]
    return Pattern(f"{left} -> {' '.join(axes)}").applied(entry, {})


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers in names as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"\.", name)]


def locate(
    tensors: Mapping[str, TensorEntry],
    convert: Callable[[dict[str, TensorEntry]], Mapping[str, TensorEntry] | None],
) -> dict[str, Located]:
    """Return which box of a tensor in memory each tensor of a file is.

    Args:
        tensors: The weights as a file names them.
        convert: Returns weights as they are in memory.

    Returns:
        The boxes by the name in the file. Tensors that are rearranged otherwise, such as transposed ones, have none.
    """
    files = {Path(f"({number})"): name for number, name in enumerate(tensors)}
    symbols = {
        name: TensorEntry(
            name, entry.dtype, entry.shape, (Chunk(file, 0, entry.nbytes, (0,) * len(entry.shape), entry.shape),)
        )
        for file, (name, entry) in zip(files, tensors.items(), strict=True)
    }
    try:
        made = convert(symbols) or {}
    except (ConfigError, CheckpointError, OSError):  # a recipe for other weights, or one that compares data
        return {}
    found: dict[str, Located] = {}
    for name, entry in made.items():
        for chunk in entry.chunks():
            source = files[chunk.file]
            if chunk.strides is None and chunk.nbytes == tensors[source].nbytes:
                found[source] = Located(name, entry.shape, chunk.box_offsets, chunk.box_sizes)
    return found


def as_in_files(
    model: Any, tensors: Mapping[str, TensorEntry], files: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry] | None:
    """Return weights as a model's files name and shape them, from those as they are in memory. It reads no data.

    Args:
        model: What `model_on_meta` or `described_model` returned.
        tensors: The weights as they are in memory; others keep their names.
        files: The weights of a folder of the same model, or what `names_in_files` returned.

    Returns:
        The weights; None if none has another name in files.

    Raises:
        ConfigError: Weights are computed while they are written, and would be cut by columns.
    """
    boxes = boxes_in_files(model, tensors, files)
    if not boxes:
        return None
    stand_ins = StandIns()
    given = {box.name: stand_ins.of(tensors[box.name]) for box in boxes.values()}
    made = {name: entry for name, entry in tensors.items() if name not in given}
    for name, box in boxes.items():
        part = given[box.name] if box.is_whole else given[box.name].cut(box.offsets, box.sizes)
        if (dim := box.dropped(files[name].shape)) is not None:
            axes = [f"a{at}" for at in range(len(part.shape))]
            kept = [axis for at, axis in enumerate(axes) if at != dim]
            part = Pattern(f"{' '.join([*axes[:dim], '1', *axes[dim + 1 :]])} -> {' '.join(kept)}").applied(part, {})
        made[name] = replace(stand_ins.resolved(part), name=name)
    return made


def boxes_in_files(
    model: Any, tensors: Mapping[str, TensorEntry], files: Mapping[str, TensorEntry]
) -> dict[str, Located]:
    """Return the boxes of weights in memory that are to be written, by the names of files; empty if no name differs.

    Args:
        model: See `as_in_files`.
        tensors: See `as_in_files`.
        files: See `as_in_files`.
    """
    found = locate(files, lambda given: as_in_memory(model, given))
    covered: Counter[str] = Counter()
    for box in found.values():
        covered[box.name] += math.prod(box.sizes)
    return {
        name: box
        for name, box in found.items()
        if name != box.name
        and box.name in tensors
        and tensors[box.name].shape == box.whole
        and tensors[box.name].numel == covered[box.name]
    }


def names_in_files(model: Any) -> dict[str, TensorEntry]:
    """Return the names, dtypes and shapes that transformers' ``save_pretrained`` would write; empty if not known."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        reverted = loading.revert_weight_conversion(model, dict(model.state_dict()))
    except Exception:  # another release, or an operation that needs data
        return {}
    return {
        name: TensorEntry(name, canonical_dtype(value.dtype), tuple(value.shape), ())
        for name, value in reverted.items()
    }
