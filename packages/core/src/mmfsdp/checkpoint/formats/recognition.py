"""Opens a checkpoint of any format, which it recognises by the content and never by the name of a file."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.files.disk import of_file
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.formats.registry import FORMATS, INDEX_SUFFIX, Format, Source, find_format
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.untrusted import refuse_special
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FormatError, closest

__all__ = ["open_layout"]


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
    while it replaced a directory, so that nothing is left at the path, what it left beside the path is opened.

    Args:
        path: A ``.pth``/``.pt`` file of ``torch.save``, a safetensors file, an index of several such files, or a
            directory: of ``rank{i}.pth`` files (mmfsdp's own or MMEngine's), of torch's distributed checkpoint (DCP),
            or of safetensors or ``torch.save`` files with their index.
        trust: Keep pickled objects that are not on the list of safe names as opaque placeholders instead of rejecting
            the file. They are not imported even then.
        reference: A complete checkpoint of the same model, for ``rank{i}.pth`` files of stock MMEngine that do not
            hold the shapes of all parameters: those saved without an optimizer, from plain SGD or with frozen
            parameters.
        format: Name of the format as `known_formats` lists it, if a directory holds several or the content misleads.
        look_up: Read the files of all ranks now. Otherwise a rank's file is read only when a chunk in it is asked for,
            provided that the first file describes the others.

    Raises:
        ConfigError: ``format`` is unknown, or names a file format for a directory or the reverse.
        CheckpointNotFoundError: There is nothing at ``path``, or a directory without a checkpoint.
        FormatError: The format is unknown or not supported.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
        IncompleteCheckpointError: Parts of the checkpoint are missing.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    path = Path(path)
    path = interrupted(path) or path
    source = Source(path, trust, partial(_opened, reference, trust), look_up, chosen=format is not None)
    try:
        refuse_special(path)
        if not path.exists():
            raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.{_nearest(path)}", file=str(path))
        with _garbage_collection_off():
            layout = (_recognised(source) if format is None else _chosen(format, path)).read(source)
        "".join(layout.tensors).encode()  # half of a surrogate pair cannot be written
        return layout
    except CheckpointError as error:
        raise of_file(error, path) from error.__cause__
    except RecursionError as error:
        raise CorruptCheckpointError(f"{path.name} is nested too deeply.", file=str(path)) from error
    except (IsADirectoryError, NotADirectoryError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}.", file=str(path)) from error


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


def _recognised(source: Source) -> Format:
    for item in FORMATS:
        if item.sniff is not None and item.sniff(source):
            return item
    path = source.path
    if path.is_dir():
        reason = "it has no rank{i}.pth, no .metadata of torch's DCP, no index and no safetensors file"
        if any(name.endswith(".distcp") for name in source.names):
            reason = "it has no .metadata, which torch's DCP writes last, so its save did not finish"
        raise CheckpointNotFoundError(
            f"The directory {str(path)!r} is not a checkpoint: {reason}. It holds "
            f"{name_list(source.names) or 'nothing'}.",
            file=str(path),
        )
    if not source.head:
        raise CorruptCheckpointError(f"{path.name} is empty.", file=str(path))
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
        name, [item for item in FORMATS if item.directory == directory], f"format of the {kind} {path.name!r}"
    )


def _opened(reference: str | os.PathLike[str] | Layout | None, trust: bool) -> Layout | None:
    return reference if reference is None or isinstance(reference, Layout) else open_layout(reference, trust=trust)


def _nearest(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its directory {str(parent)!r} does not exist either."
    return closest(path.name, [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")])
