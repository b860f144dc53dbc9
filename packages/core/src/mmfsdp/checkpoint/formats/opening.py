"""Opens a checkpoint of any format, which it recognises by the content."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.damage import not_permitted
from mmfsdp.checkpoint.failed_downloads import explained, stand_in
from mmfsdp.checkpoint.files.disk import checkpoint_path, nearest, of_file, permission_errors
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.other_frameworks import what_to_use
from mmfsdp.checkpoint.formats.common.source import INDEX_SUFFIX, PART_FILE, SourcePath
from mmfsdp.checkpoint.formats.registry import FORMATS, find_format
from mmfsdp.checkpoint.formats.torch_files.model_parts import what_merges
from mmfsdp.checkpoint.integrity import refuse_special
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)

__all__ = ["open_layout", "opened", "optimizers_beside", "weights_beside"]

_MOST_TRIED, _MOST_DIRECTORIES = 100, 10  # names in a directory
_OPTIMIZER = re.compile(r"(.*/)?optim.*")
_NO_WEIGHTS = re.compile(  # what trainers save beside weights and optimizer
    r"(rng_state|random_states|scheduler|lr_scheduler|training_args|scaler|sampler|dl_state_dict|data)(_\d+)?"
    r"\.(bin|pt|pth)|rng|dataloader"
)


def open_layout(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    reference: str | os.PathLike[str] | Layout | None = None,
    format: str | None = None,
    look_up: bool = True,
) -> Layout:
    """Read the layout of a checkpoint: its tensors, where their bytes lie, and everything else that it holds.

    Only metadata is read; torch is not imported, and nothing that a pickle names is imported or run. If a process died
    while it replaced a directory, so that nothing is left at the path, the directory left beside the path is opened.

    Args:
        path: A ``.pth``/``.pt`` file of ``torch.save``, a safetensors file, an index of several such files, or a
            directory: of a file per rank (``rank{i}.pth`` of mmfsdp or MMEngine, or DTensors under any name that ends
            with the rank), of torch's distributed checkpoint (DCP), of DeepSpeed, of fairscale, or of safetensors or
            ``torch.save`` files with their index. Or the URL of one of these: ``https://``, or what fsspec reads, such
            as ``s3://``.
        trust: Keep pickled objects that are not on the list of safe names as opaque placeholders instead of rejecting
            the file. They are not imported even then.
        reference: A complete checkpoint of the same model, for ``rank{i}.pth`` files of stock MMEngine and DCP
            directories of FSDP1's ``LOCAL_STATE_DICT`` that do not hold the shapes of all parameters: those saved
            without an optimizer, from plain SGD or with frozen parameters.
        format: Name of the format as `known_formats` lists it, if a directory holds several or the content misleads.
        look_up: Read the files of all ranks now. Otherwise a rank's file is read only when a chunk in it is asked for,
            provided that the first file describes the others.

    Raises:
        ConfigError: ``format`` is unknown, or names a file format for a directory or the reverse.
        CheckpointNotFoundError: There is nothing at ``path``, or a directory without a checkpoint.
        CheckpointPermissionError: The user of this process may not read it.
        FormatError: The format is unknown or not supported.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
        IncompleteCheckpointError: Parts of the checkpoint are missing.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    path = checkpoint_path(path)
    with permission_errors(path):
        path = interrupted(path) or path
    source = SourcePath(path, trust, partial(_reference, reference, trust), look_up, chosen=format is not None)
    try:
        refuse_special(path)
        if not path.exists():
            raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.{nearest(path)}", file=str(path))
        with _garbage_collection_off():
            layout = (_recognised(source) if format is None else _chosen(format, path)).read(source)
        "".join(layout.tensors).encode()  # half of a surrogate pair cannot be written
        return replace(layout, weights_beside=partial(weights_beside, path))
    except CheckpointError as error:
        raise explained(of_file(error, path)) from error.__cause__
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(
            f"{path.name} lists {os.path.basename(error.filename or '')!r}, which is not there: either it is a link "
            "to a file that does not exist, or another process removed it while the checkpoint was read. Restore the "
            "file, or try again when no other process writes there.",
            file=str(path),
        ) from error
    except PermissionError as error:
        raise not_permitted(path, error) from error
    except RecursionError as error:
        raise CorruptCheckpointError(f"{path.name} is nested too deeply.", file=str(path)) from error
    except (IsADirectoryError, NotADirectoryError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}.", file=str(path)) from error


def opened(given: str | os.PathLike[str] | Layout, **options: Any) -> Layout:
    """Return a layout that is given as it is, or what `open_layout` returns for a path; ``options`` are its own."""
    return given if isinstance(given, Layout) else open_layout(given, **options)


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    # The collector looks at all objects each time their number has grown by some. A large checkpoint is read into a
    # hundred thousand objects and more, none of them garbage: docs/adr/0006-mechanisms-removed-and-kept.md.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recognised(source: SourcePath) -> Format:
    if (source.path.suffix == ".distcp" or source.path.name == ".metadata") and not source.names:
        raise FormatError(
            f"{source.path.name} is one file of torch's distributed checkpoint; open its directory "
            f"{str(source.path.parent)!r} instead.",
            file=str(source.path),
        )
    for item in FORMATS:
        if item.recognises(source):
            return item
    path = source.path
    if text := what_to_use(source.head, source.names or [path.name]):
        raise FormatError(f"{path.name} {text}", file=str(path))
    if path.is_dir():
        reason = (
            "it has no file of a rank such as rank0.pth, no .metadata of torch's DCP, no index and no safetensors file"
        )
        if any(name.endswith(".distcp") for name in source.names):
            reason = "it has no .metadata, which torch's DCP writes last, so its save did not finish"
        elif any(PART_FILE.fullmatch(name) for name in source.names):
            reason = (
                "it has files of a model in several, but no index (*.index.json), and not all that their names tell of"
            )
        raise CheckpointNotFoundError(
            f"The directory {str(path)!r} is not a checkpoint: {reason}. It holds "
            f"{name_list(source.names) or 'nothing'}.{_nearby(source)}",
            file=str(path),
        )
    if not source.head:
        raise CorruptCheckpointError(f"{path.name} is empty.", file=str(path))
    if (found := stand_in(path)) is not None:
        raise found
    raise FormatError(
        f"{path.name} is not a checkpoint of a known format: it begins with {source.head[:8]!r}. Known are the files "
        "of torch.save (.pth, .pt, .bin), safetensors files, their indexes, and directories of rank{i}.pth files or of "
        "torch's distributed checkpoint.",
        file=str(path),
    )


def _chosen(name: str, path: Path) -> Format:
    directory = path.is_dir() or path.name.endswith(INDEX_SUFFIX)
    kind = "directory" if directory else "file"
    return find_format(
        name,
        [item for item in FORMATS if item.reads and item.directory == directory],
        f"format of the {kind} {path.name!r}",
    )


def _reference(given: str | os.PathLike[str] | Layout | None, trust: bool) -> Layout | None:
    return None if given is None else opened(given, trust=trust)


def _nearby(source: SourcePath) -> str:
    """Return a sentence that names the checkpoints within a directory, or the one that the directory is part of."""
    path, names = source.path, source.names
    unfinished = any(name.endswith(".distcp") for name in names)
    names = [name for name in names if not name.endswith(".distcp")]  # which are parts
    inner = _checkpoints_within(path, names) or [
        f"{name}/{below}" for name in names[:_MOST_DIRECTORIES] for below in _checkpoints_within(path / name)
    ]
    if inner and (merges := what_merges(path / inner[0])):
        return f" {merges}"
    if inner:
        return f" Open a checkpoint within it: {name_list(inner)}."
    if names and not unfinished and not is_remote(path):
        above = path.absolute().parent
        if _looks_like_checkpoint(above):
            return f" The directory above it is a checkpoint: {str(above)!r}."
    return ""


def optimizers_beside(path: Path) -> list[str]:
    """Return the names beside a checkpoint's that are of optimizers, as accelerate's ``optimizer_0``."""
    return [name for name in _beside(path) if _OPTIMIZER.fullmatch(name)]


def weights_beside(path: Path) -> list[str]:
    """Return the names of other checkpoints beside one that is of an optimizer; none for others."""
    if not _OPTIMIZER.fullmatch(path.name):
        return []
    return [name for name in _beside(path) if not _OPTIMIZER.fullmatch(name)]


def _beside(path: Path) -> list[str]:
    if is_remote(path):
        return []
    path = path.absolute()
    return [name for name in _checkpoints_within(path.parent) if name != path.name]


def _checkpoints_within(directory: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the names in a directory, if it is one, that look like checkpoints; names of optimizers come last."""
    try:
        if names is None:
            names = SourcePath(directory).names
        tried = [name for name in names if not _NO_WEIGHTS.fullmatch(name)][:_MOST_TRIED]
        found = [name for name in tried if _looks_like_checkpoint(directory / name)]
    except OSError:  # what cannot be read is not suggested
        return []
    return sorted(found, key=lambda name: _OPTIMIZER.fullmatch(name) is not None)


def _looks_like_checkpoint(path: Path) -> bool:
    source, directory = SourcePath(path), path.is_dir()
    return (directory or path.is_file()) and any(
        item.directory == directory and item.recognises(source) for item in FORMATS
    )
