"""Turns a checkpoint of any format into one file: read its layout, decide what to keep, prove it whole, copy bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.atomic import atomic_output
from mmfsdp.checkpoint.copying import Progress
from mmfsdp.checkpoint.coverage import check_coverage
from mmfsdp.checkpoint.detect import open_layout
from mmfsdp.checkpoint.formats.safetensors_file import write_safetensors
from mmfsdp.checkpoint.formats.torch_zip_writer import write_torch_zip
from mmfsdp.checkpoint.layout import Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import select_tensors, tensor_free_paths
from mmfsdp.errors import ConfigError, FormatError, closest

__all__ = ["ConversionReport", "convert"]

_SUFFIXES = {".safetensors": "safetensors", ".pth": "torch_zip", ".pt": "torch_zip"}
_FORMATS = {"safetensors": "safetensors", "torch_zip": "torch_zip", "pth": "torch_zip", "pt": "torch_zip"}


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion wrote."""

    tensors: int
    """Number of names written; tied tensors count once per name."""
    bytes: int
    """Bytes of tensor data written; tied tensors count once in a ``.pth`` file."""
    dropped: tuple[str, ...]
    """Paths of the parts of the source that are not in the target."""
    seconds: float
    """Wall time, the reading of metadata included."""
    format: str
    """``'safetensors'`` or ``'torch_zip'``."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keep: str = "model",
    overwrite: bool = False,
    trust: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    to: str | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
) -> ConversionReport:
    """Write a checkpoint as one safetensors or ``.pth`` file, in constant memory and without torch.

    The target appears complete or not at all. Before a byte is copied, every tensor is proven to be covered by what is
    stored.

    Args:
        source: A checkpoint of any kind that ``open_layout`` reads.
        target: The file to write; its suffix ``.safetensors``, ``.pth`` or ``.pt`` says the format.
        keep: ``'model'``: the weights (in a ``.pth`` file as ``{'state_dict': ..., 'meta': ...}``, the shape that
            OpenMMLab publishes). ``'all'``: everything; in a ``.pth`` file what a ``full`` checkpoint holds, in a
            safetensors file every tensor under its whole path such as ``'optimizer/state/0/exp_avg'``. Otherwise a
            top-level key such as ``'ema_state_dict'``.
        overwrite: Replace an existing target.
        trust: Keep unknown pickled objects as opaque placeholders, never imported, instead of refusing the source. They
            are written again into a ``.pth`` target.
        verify: Compare stored CRC-32 checksums with the data; costs one more pass over the source.
        progress: Called with the bytes copied so far and the bytes to copy. What it raises cancels the conversion.
        to: ``'safetensors'`` or ``'pth'``, where the suffix does not say.
        reference: A whole checkpoint of the same model, where ``source`` does not say all shapes; see ``open_layout``.

    Raises:
        ConfigError: ``keep``, ``to`` or the suffix of ``target`` is not known, or the format cannot hold a dtype.
        CheckpointNotFoundError: There is no checkpoint at ``source``, or no directory for ``target``.
        TargetExistsError: ``target`` exists and ``overwrite`` is false.
        FormatError, UnsafePickleError: ``source`` cannot be read; see ``open_layout``.
        IncompleteCheckpointError, CorruptCheckpointError: ``source`` lacks data, or its data is damaged.
    """
    began = time.perf_counter()
    target = Path(target)
    written_format = _target_format(target, to)
    layout = open_layout(source, trust=trust, reference=reference)
    if target.exists() and any(os.path.samefile(target, file) for file in layout.files()):
        raise ConfigError(f"The target {str(target)!r} is part of the source. Choose another path.", file=str(target))

    tree, dropped = _selected(layout, keep)
    names = select_tensors(tree)
    flat: dict[str, TensorEntry] = {}
    if written_format == "safetensors":
        flat = _flat(layout, tree, keep)
        dropped = [*dropped, *_not_tensors(tree)]
    check_coverage(layout, names)
    with atomic_output(target, overwrite=overwrite) as temporary:
        if written_format == "safetensors":
            count = write_safetensors(temporary, flat, verify=verify, progress=progress)
        else:
            count = write_torch_zip(temporary, tree, layout.tensors, verify=verify, progress=progress)
    return ConversionReport(len(names), count, tuple(dropped), time.perf_counter() - began, written_format)


def _target_format(target: Path, to: str | None) -> str:
    if to is not None:
        if to not in _FORMATS:
            hint = closest(to, _FORMATS) or f" Known are {_listed(list(_FORMATS))}."
            raise ConfigError(f"{to!r} is not a format to write.{hint}")
        return _FORMATS[to]
    suffix = target.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"The suffix {target.suffix!r} of {target.name!r} does not say which format to write. Use .safetensors, "
            ".pth or .pt, or say it with to='safetensors' or to='pth' (--to)."
        )
    return _SUFFIXES[suffix]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more


def _selected(layout: Layout, keep: str) -> tuple[dict[Any, Any], list[str]]:
    """Return the part of the tree to write, and the top-level keys that are left out."""
    if not isinstance(layout.tree, dict):
        raise FormatError(
            f"{layout.path.name} holds a {type(layout.tree).__name__} and not a mapping of names.",
            file=str(layout.path),
        )
    tree: dict[Any, Any] = layout.tree
    if keep == "all":
        return tree, []
    if keep == "model":
        if layout.is_flat:
            return {"state_dict": tree, "meta": {}}, []
        keep = next((key for key in ("state_dict", "model") if isinstance(tree.get(key), dict)), "state_dict")
        if keep not in tree:
            raise FormatError(
                f"{layout.path.name} has no 'state_dict'. Its top-level keys are {_listed(layout.top_level)}; name one "
                "with keep= (--keep).",
                file=str(layout.path),
            )
        kept = {"state_dict": tree[keep], "meta": tree.get("meta", {})}
        return kept, [key for key in layout.top_level if key not in (keep, "meta")]
    found = [key for key in tree if str(key) == keep]
    if not found:
        hint = closest(keep, ["model", "all", *layout.top_level])
        raise ConfigError(
            f"keep={keep!r} is neither 'model' nor 'all' nor a top-level key of {layout.path.name}.{hint} "
            f"Its keys are {_listed(layout.top_level)}."
        )
    return {found[0]: tree[found[0]]}, [key for key in layout.top_level if key != keep]


def _flat(layout: Layout, tree: dict[Any, Any], keep: str) -> dict[str, TensorEntry]:
    """Return the tensors by the names that they get in a safetensors file."""
    if keep == "all":
        return {name: layout.tensors[name] for name in select_tensors(tree)}
    part = tree["state_dict"] if keep == "model" else next(iter(tree.values()))
    flat: dict[str, TensorEntry] = {}
    for key, value in part.items() if isinstance(part, dict) else [("", part)]:
        below = select_tensors(value)
        names = [str(key)] if isinstance(value, TensorRef) else [name.partition("/")[2] or name for name in below]
        for name, source in zip(names, below, strict=True):
            if name in flat:
                raise FormatError(f"{layout.path.name} holds two tensors named {name!r}.", file=str(layout.path))
            flat[name] = layout.tensors[source]
    return flat


def _not_tensors(tree: dict[Any, Any]) -> list[str]:
    return [path for path in tensor_free_paths(tree) if tree.get(path, True) not in ({}, [])]
