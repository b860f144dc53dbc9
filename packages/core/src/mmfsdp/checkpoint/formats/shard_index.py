"""Reads the index that Hugging Face puts beside a checkpoint in several files: which file holds which tensor.

``{"metadata": {...}, "weight_map": {tensor: file name}}``: https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmfsdp.checkpoint.files.opening import refuse_special
from mmfsdp.checkpoint.layout import Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.strict_json import parse_json
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["combined", "inside", "read_index"]

_LIMIT = 200_000_000  # bytes; a million tensors take about half of it


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor.

    Args:
        path: A file such as ``model.safetensors.index.json``. The files that it names lie beside it.

    Raises:
        FormatError: It is not an index, or names a file outside of its directory.
        CorruptCheckpointError: It is not JSON.
        IncompleteCheckpointError: A file that it names is missing.
    """
    refuse_special(path, directory=False)
    if path.stat().st_size > _LIMIT:
        raise FormatError(f"{path.name} is too large to be an index of shards.", file=str(path))
    try:
        content = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.name} is damaged: {error}.", file=str(path)) from error
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise FormatError(
            f"{path.name} is not an index of shards: it has no 'weight_map' of tensors to file names.", file=str(path)
        )
    files = {name: inside(path.parent, name, path) for name in dict.fromkeys(shards.values())}
    for tensor, name in shards.items():
        if not files[name].is_file():
            raise IncompleteCheckpointError(
                f"{name}, which holds tensor {tensor!r} by {path.name}, is missing.", file=str(files[name])
            )
    return {tensor: files[name] for tensor, name in shards.items()}


def inside(directory: Path, name: str, origin: Path) -> Path:
    """Return the path of a file in a directory, following links, if it is there.

    Args:
        directory: Where the file must be.
        name: Its path relative to the directory, as some file says.
        origin: That file, for messages.

    Raises:
        FormatError: The name leads out of the directory (other than to the blobs of Hugging Face's cache), or is not
            that of a file.
    """
    path = directory / name
    parts = Path(name).parts
    if "\0" in name or not parts or Path(name).is_absolute() or ".." in parts:
        raise FormatError(f"{origin.name} names the file {name!r}, which is not in its directory.", file=str(origin))
    try:
        target, home = path.resolve(), directory.resolve()
        leads_out = not any(target.is_relative_to(root) for root in (home, *_blobs(home)))
    except (OSError, RuntimeError) as error:  # links in a circle
        raise FormatError(f"{origin.name} names the file {name!r}: {error}.", file=str(origin)) from error
    if leads_out:
        raise FormatError(
            f"{origin.name} names the file {name!r}, which is a link out of its directory.", file=str(path)
        )
    refuse_special(path, directory=False)
    return path


def _blobs(directory: Path) -> list[Path]:
    """Return where the files of a snapshot in Hugging Face's cache lie, which are links.

    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repository = directory.parent.parent
    of_a_cache = directory.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return [repository / "blobs"] if of_a_cache else []


def combined(path: Path, kind: str, files: Mapping[str, Path], held: Mapping[Path, Layout]) -> Layout:
    """Return the layout of a checkpoint in several files, each of which holds a bare state dict.

    Args:
        path: What was opened.
        kind: Name of the format.
        files: Tensor to file, as the index says.
        held: The layout of each file.

    Raises:
        FormatError: A file holds anything but tensors by name.
        IncompleteCheckpointError: A file lacks a tensor that the index expects in it.
        CorruptCheckpointError: A file holds a tensor that the index does not expect in it.
    """
    for file, layout in held.items():
        if layout.tensors and not layout.is_flat:
            raise FormatError(f"{file.name} is not a bare state dict, as a shard should be.", file=str(file))
        for name in layout.tensors:
            if files.get(name) != file:
                raise CorruptCheckpointError(
                    f"{file.name} holds tensor {name!r}, which the index does not expect there: it is of another save.",
                    file=str(file),
                )
    tensors: dict[str, TensorEntry] = {}
    for name, file in files.items():
        if name not in held[file].tensors:
            raise IncompleteCheckpointError(
                f"{file.name} lacks tensor {name!r}, which the index expects in it.", file=str(file)
            )
        tensors[name] = held[file].tensors[name]
    return Layout(path, kind, 1, tensors, {name: TensorRef(name) for name in tensors})
