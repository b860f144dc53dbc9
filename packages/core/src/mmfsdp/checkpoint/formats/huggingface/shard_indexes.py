"""Reads and writes folders with Hugging Face's index of which file holds which tensor.

``{"metadata": {...}, "weight_map": {tensor: file name}}``: https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import (
    INDEX_SUFFIX,
    MODEL_FILES,
    TORCH_FILE,
    CheckpointContent,
    SourcePath,
    all_parts,
    is_legacy_torch,
    is_zip,
    looks_like_safetensors,
)
from mmfsdp.checkpoint.formats.safetensors import safetensors_files
from mmfsdp.checkpoint.integrity import inside, parse_json, refuse_special
from mmfsdp.checkpoint.layout import Layout, PlannedFile, TensorRef
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["plan_folder", "plan_write", "read", "read_folder", "read_torch"]

_LIMIT = 200_000_000  # bytes; a million tensors take about half of it
_DEFAULT_SHARD = 5 * 1000**3  # bytes, as transformers' save_pretrained


def read(source: SourcePath) -> Layout:
    """Read the layout of files with an index; unless the format was chosen, they may be files of ``torch.save``.

    Raises:
        IncompleteCheckpointError: A file or a tensor is missing; it is named.
        CorruptCheckpointError: The index and the files contradict each other, or a file is damaged.
        FormatError: A file is outside of the directory, or of another kind.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    if parts := _without_index(source, ".safetensors"):
        return _joined(
            source.path, "safetensors_index", {file: safetensors_files.read(SourcePath(file)) for file in parts}
        )
    files = _read_index(_index(source, ".safetensors"))
    first = next(iter(files.values()), None)
    if not source.chosen and (first is None or not _is_safetensors(first)):
        return _read_torch(source, files)
    held = {file: safetensors_files.read(SourcePath(file)) for file in dict.fromkeys(files.values())}
    return _combined(source.path, "safetensors_index", files, held)


def _is_safetensors(file: Path) -> bool:
    """Tell whether a file is of safetensors by its content, or by its name, so that damage is reported as damage."""
    return file.name.endswith(".safetensors") or looks_like_safetensors(SourcePath(file).head)


def read_torch(source: SourcePath) -> Layout:
    """Read the layout of one file of ``torch.save``, or of several with an index; errors as for `read`."""
    path = source.path
    if TORCH_FILE in source.names and TORCH_FILE + INDEX_SUFFIX not in source.names:
        layout = _torch_file(SourcePath(inside(path, TORCH_FILE, path), source.trust))
        return replace(layout, path=path, format="torch_index")
    if parts := _without_index(source, ".bin"):
        return _joined(path, "torch_index", {file: _torch_file(SourcePath(file, source.trust)) for file in parts})
    return _read_torch(source, _read_index(_index(source, ".bin")))


def _read_torch(source: SourcePath, files: Mapping[str, Path]) -> Layout:
    held = {file: _torch_file(SourcePath(file, source.trust)) for file in dict.fromkeys(files.values())}
    return _combined(source.path, "torch_index", files, held)


def _torch_file(source: SourcePath) -> Layout:
    from mmfsdp.checkpoint.formats.torch_files import torch_legacy, torch_zip  # which safetensors files do without

    if is_zip(source.head):
        return torch_zip.read(source)
    if is_legacy_torch(source.head):
        return torch_legacy.read(source)
    if not source.head:
        raise CorruptCheckpointError(f"{source.path.name} is empty.", file=str(source.path))
    raise FormatError(
        f"{source.path.name} is not a file of torch.save: it begins with {source.head[:8]!r}.", file=str(source.path)
    )


def _index(source: SourcePath, suffix: str) -> Path:
    path = source.path
    if path.is_file():
        return path
    found = [name for name in source.names if name.endswith(f"{suffix}{INDEX_SUFFIX}")]
    if source.chosen and len(found) != 1:
        raise CheckpointNotFoundError(f"{path.name} holds {len(found)} files *{suffix}{INDEX_SUFFIX} (expected one).")
    # Hugging Face's directories often hold the same weights twice: safetensors are preferred.
    found = found or [name for name in source.names if name.endswith(INDEX_SUFFIX)]
    if len(found) > 1:
        raise FormatError(
            f"{path.name} holds several checkpoints: {', '.join(found[:8])}. Open one of them.", file=str(path)
        )
    return inside(path, found[0], path)


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    refuse_special(path, directory=False)
    if path.stat().st_size > _LIMIT:
        raise FormatError(f"{path.name} is too large to be an index of shards.", file=str(path))
    try:
        content = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path.name, str(error), path) from error
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


def _combined(path: Path, kind: str, files: Mapping[str, Path], held: Mapping[Path, Layout]) -> Layout:
    """Return the layout of a checkpoint in several files, where each file holds a bare state dict.

    The index decides which file a tensor is read from. Files that were laid over others leave older copies in those.
    """
    copies: dict[tuple[Path, Path], list[str]] = {}
    for file, layout in held.items():
        if layout.tensors and not layout.is_flat:
            raise FormatError(f"{file.name} is not a bare state dict, as a shard should be.", file=str(file))
        for name in layout.tensors:
            if name not in files:
                raise CorruptCheckpointError(
                    f"{file.name} holds tensor {name!r}, which the index does not list: the file is of another save, "
                    "or the index is incomplete. Use files and index of one save, or add the name to its 'weight_map'.",
                    file=str(file),
                )
            if files[name] != file:
                copies.setdefault((file, files[name]), []).append(name)
    tensors: dict[str, TensorEntry] = {}
    for name, file in files.items():
        if name not in held[file].tensors:
            others = [other.name for other, names in copies if names == file and name in held[other].tensors]
            beside = f"; {others[0]} holds it, so files and index are of different saves" if others else ""
            raise IncompleteCheckpointError(
                f"{file.name} lacks tensor {name!r}, which the index expects in it{beside}.", file=str(file)
            )
        tensors[name] = held[file].tensors[name]
    tree = {name: TensorRef(name) for name in tensors}
    return Layout(path, kind, 1, tensors, tree, notes=tuple(_copy_notes(copies)))


def _without_index(source: SourcePath, suffix: str) -> list[Path]:
    """Return the files of a model whose index was lost, if their names say that all are there."""
    if any(name.endswith(INDEX_SUFFIX) for name in source.names):
        return []
    return [inside(source.path, name, source.path) for name in all_parts(source.names, suffix)]


def _joined(path: Path, kind: str, held: Mapping[Path, Layout]) -> Layout:
    """Return the layout of a checkpoint in several files without an index."""
    files: dict[str, Path] = {}
    for file, layout in held.items():
        for name in layout.tensors:
            if name in files:
                raise CorruptCheckpointError(
                    f"{files[name].name} and {file.name} both hold tensor {name!r}, and there is no index "
                    f"(*{INDEX_SUFFIX}) that says which one counts. Restore the index.",
                    file=str(file),
                )
            files[name] = file
    note = f"{path.name} has no index: all {len(held)} files that their names tell of were read together"
    return replace(_combined(path, kind, files, held), notes=(note,))


def _copy_notes(copies: Mapping[tuple[Path, Path], list[str]]) -> Iterator[str]:
    for (file, read), names in copies.items():
        what = f"tensor {names[0]!r}" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]!r}"
        note = f"{file.name} also holds {what}, which the index maps to {read.name}: only what is there is read"
        # transformers reads the whole of every file, in the order of their names; the last copy counts.
        yield note + ("" if file.name < read.name else f"; transformers would load the copy in {file.name}")


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan safetensors files of limited size and their index.

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
    """
    tensors = content.named
    shards = _divided(tensors, content.max_shard_size or _DEFAULT_SHARD, content.stem)
    files = [
        safetensors_files.plan_file(file, {name: tensors[name] for name in names}) for file, names in shards.items()
    ]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in tensors.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return [*files, PlannedFile(f"{content.stem}.safetensors{INDEX_SUFFIX}", len(text), (), lambda _: [(0, text)])]


def _divided(tensors: Mapping[str, TensorEntry], max_shard_size: int, stem: str) -> dict[str, list[str]]:
    """Return which file holds which tensors, in the order of the checkpoint."""
    groups: list[list[str]] = []
    size = 0
    for name, entry in tensors.items():
        if not groups or (size + entry.nbytes > max_shard_size and size > 0):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.nbytes
    groups = groups or [[]]
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def read_folder(source: SourcePath) -> Layout:
    """Read the layout of a folder's weights; errors as for the formats of its files.

    Other safetensors files in the folder are ignored, as both libraries ignore them.

    Raises:
        CheckpointNotFoundError: There are no weights under these names.
    """
    path = source.path
    name = next((name for name in MODEL_FILES if name in source.names), None)
    if name is None:
        raise CheckpointNotFoundError(f"{path.name} holds neither {MODEL_FILES[0]} nor its index.", file=str(path))
    file = SourcePath(inside(path, name, path), source.trust)
    layout = read(file) if name.endswith(INDEX_SUFFIX) else safetensors_files.read(file)
    known = layout.format in ("safetensors", "safetensors_index")
    return replace(layout, path=path, format="huggingface" if known else layout.format)


def plan_folder(content: CheckpointContent) -> list[PlannedFile]:
    """Plan one safetensors file, or, if it would be too large, several and their index.

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
    """
    files = plan_write(content)
    return files if len(files) > 2 else [safetensors_files.plan_file(f"{content.stem}.safetensors", content.named)]
