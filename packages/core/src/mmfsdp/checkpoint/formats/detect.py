"""Opens a checkpoint of any format: what it is, is decided by its content and never by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mmfsdp.checkpoint.collecting import without_collection
from mmfsdp.checkpoint.files.file_errors import of_file
from mmfsdp.checkpoint.files.opening import refuse_special
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.formats.dcp import is_dcp, read_dcp
from mmfsdp.checkpoint.formats.mmengine_local import read_mmengine_local
from mmfsdp.checkpoint.formats.rank_files import RankFiles
from mmfsdp.checkpoint.formats.rank_local import read_rank_local
from mmfsdp.checkpoint.formats.safetensors_file import looks_like_safetensors, read_safetensors
from mmfsdp.checkpoint.formats.safetensors_index import read_safetensors_directory, read_safetensors_index
from mmfsdp.checkpoint.formats.shard_index import inside, read_index
from mmfsdp.checkpoint.formats.torch_index import read_torch_index
from mmfsdp.checkpoint.formats.torch_legacy import looks_like_torch_legacy, read_torch_legacy
from mmfsdp.checkpoint.formats.torch_zip import read_torch_zip
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    closest,
)

__all__ = ["open_layout"]

_INDEX_SUFFIX = ".index.json"


def open_layout(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    reference: str | os.PathLike[str] | Layout | None = None,
    format: str | None = None,
    look_up: bool = True,
) -> Layout:
    """Read the layout of a checkpoint: its tensors, where their bytes lie, and everything else that it holds.

    Only metadata is read; torch is not imported, and nothing that a pickle names is imported or run. Where a process
    died while it replaced a directory, so that there is nothing at the path, what it left beside it is opened.

    Args:
        path: A ``.pth``/``.pt`` file of ``torch.save``, a safetensors file, an index of several such files, or a
            directory: of ``rank{i}.pth`` files (mmfsdp's own or MMEngine's), of torch's distributed checkpoint (DCP),
            or of safetensors or ``torch.save`` files with their index.
        trust: Keep pickled objects that are not on the list of safe names as opaque placeholders instead of refusing
            the file. They are not imported even then.
        reference: A whole checkpoint of the same model, for ``rank{i}.pth`` files of stock MMEngine that do not say
            the shapes of all parameters: those saved without an optimizer, of plain SGD or with frozen parameters.
        format: What it is, by the names of `known_formats`, where a directory holds several or the content misleads.
        look_up: Read what every rank's file says of itself. Otherwise files of ranks are left alone, as far as the
            first one says what they hold, until a chunk of theirs is asked for.

    Raises:
        ConfigError: ``format`` is unknown, or is that of a file where there is a directory, or the other way.
        CheckpointNotFoundError: There is nothing at ``path``, or a directory without a checkpoint.
        FormatError: It is of a format that is not known or not supported.
        UnsafePickleError: It names something that is not on the list of safe names.
        IncompleteCheckpointError: Parts of it are missing.
        CorruptCheckpointError: It is damaged.
    """
    path = Path(path)
    path = interrupted(path) or path
    try:
        with without_collection():
            layout = _open(path, trust, reference, format, look_up)
        "".join(layout.tensors).encode()  # half of a surrogate pair cannot be written
        return layout
    except CheckpointError as error:
        raise of_file(error, path) from error.__cause__
    except RecursionError as error:
        raise CorruptCheckpointError(f"{path.name} is nested too deeply.", file=str(path)) from error
    except (IsADirectoryError, NotADirectoryError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}.", file=str(path)) from error


def _open(
    path: Path,
    trust: bool,
    reference: str | os.PathLike[str] | Layout | None,
    format: str | None,
    look_up: bool,
) -> Layout:
    refuse_special(path)
    if format is not None and path.exists():
        return _open_as(format, path, trust, reference)
    if path.is_dir():
        return _open_directory(path, trust, reference, look_up)
    if not path.exists():
        raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.{_nearest(path)}", file=str(path))
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise CorruptCheckpointError(f"{path.name} is empty.", file=str(path))
    if head.startswith(b"PK\x03\x04"):
        return read_torch_zip(path, trust=trust)
    if looks_like_safetensors(head):
        return read_safetensors(path)
    if looks_like_torch_legacy(head):
        return read_torch_legacy(path, trust=trust)
    if head.lstrip().startswith(b"{"):
        return _open_index(path, path, trust)
    raise FormatError(
        f"{path.name} is not a checkpoint of a known format: it begins with {head[:8]!r}. Known are the files of "
        "torch.save (.pth, .pt, .bin), safetensors files, their indexes, and directories of rank{i}.pth files or of "
        "torch's distributed checkpoint.",
        file=str(path),
    )


def _open_as(format: str, path: Path, trust: bool, reference: str | os.PathLike[str] | Layout | None) -> Layout:
    files: dict[str, Callable[[], Layout]] = {
        "torch_zip": lambda: read_torch_zip(path, trust=trust),
        "torch_legacy": lambda: read_torch_legacy(path, trust=trust),
        "safetensors": lambda: read_safetensors(path),
    }
    directories: dict[str, Callable[[], Layout]] = {
        "dcp": lambda: read_dcp(path, trust=trust),
        "rank_local": lambda: read_rank_local(_rank_files(path, trust)),
        "mmengine_local": lambda: read_mmengine_local(_rank_files(path, trust), reference=_opened(reference, trust)),
        "safetensors_index": lambda: read_safetensors_index(_index_of(path, ".safetensors"), path),
        "safetensors_ranks": lambda: read_safetensors_directory(path),
        "torch_index": lambda: read_torch_index(_index_of(path, ".bin"), path, trust=trust),
    }
    readers = directories if path.is_dir() or path.name.endswith(_INDEX_SUFFIX) else files
    if format not in readers:
        kind = "directory" if readers is directories else "file"
        hint = closest(format, readers, count=1) or f" Known for a {kind} are {', '.join(map(repr, readers))}."
        raise ConfigError(f"format={format!r} (--from) is not a format of the {kind} {path.name!r}.{hint}")
    return readers[format]()


def _rank_files(path: Path, trust: bool) -> RankFiles:
    files = RankFiles(path, trust=trust)
    if not files.paths:
        raise CheckpointNotFoundError(f"{path.name} holds no rank{{i}}.pth.", file=str(path))
    return files


def _index_of(path: Path, suffix: str) -> Path:
    if path.is_file():
        return path
    found = sorted(entry for entry in path.iterdir() if entry.name.endswith(f"{suffix}{_INDEX_SUFFIX}"))
    if len(found) != 1:
        raise CheckpointNotFoundError(f"{path.name} holds {len(found)} files *{suffix}{_INDEX_SUFFIX} (expected one).")
    return inside(path, found[0].name, path)


def _opened(reference: str | os.PathLike[str] | Layout | None, trust: bool) -> Layout | None:
    return reference if reference is None or isinstance(reference, Layout) else open_layout(reference, trust=trust)


def _open_directory(
    path: Path, trust: bool, reference: str | os.PathLike[str] | Layout | None, look_up: bool
) -> Layout:
    files = RankFiles(path, trust=trust)
    if files.paths:
        if files.of_mmfsdp:
            return read_rank_local(files, look_up=look_up)
        return read_mmengine_local(files, reference=_opened(reference, trust))
    if is_dcp(path):
        return read_dcp(path, trust=trust)
    names = sorted(entry.name for entry in path.iterdir())
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if indexes:
        # Hugging Face's directories often hold the same weights twice.
        preferred = [name for name in indexes if name.endswith(f".safetensors{_INDEX_SUFFIX}")] or indexes
        if len(preferred) > 1:
            raise FormatError(
                f"{path.name} holds several checkpoints: {', '.join(preferred[:8])}. Open one of them.", file=str(path)
            )
        return _open_index(inside(path, preferred[0], path), path, trust)
    if any(name.endswith(".safetensors") for name in names):
        return read_safetensors_directory(path)
    shown = ", ".join(repr(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    reason = "it has no rank{i}.pth, no .metadata of torch's DCP, no index and no safetensors file"
    if any(name.endswith(".distcp") for name in names):
        reason = "it has no .metadata, which torch's DCP writes last, so its save did not finish"
    raise CheckpointNotFoundError(
        f"The directory {str(path)!r} is not a checkpoint: {reason}. It holds {shown or 'nothing'}.",
        file=str(path),
    )


def _open_index(index: Path, path: Path, trust: bool) -> Layout:
    files = read_index(index)
    first = next(iter(files.values()), None)
    head = b""
    if first is not None:
        with first.open("rb") as file:
            head = file.read(16)
    if looks_like_safetensors(head):
        return read_safetensors_index(index, path)
    return read_torch_index(index, path, trust=trust)


def _nearest(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Its directory {str(parent)!r} does not exist either."
    return closest(path.name, [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")])
