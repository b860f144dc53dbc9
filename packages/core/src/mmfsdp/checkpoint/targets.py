"""The formats that can be written: how a target is recognised, which files it will have, and what writes them."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.copying import Progress
from mmfsdp.checkpoint.formats.safetensors_file import write_safetensors
from mmfsdp.checkpoint.formats.safetensors_shards import plan_shards, write_safetensors_shards
from mmfsdp.checkpoint.formats.torch_zip_writer import distinct_bytes, write_torch_zip
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.dtypes import safetensors_code
from mmfsdp.errors import ConfigError, closest

__all__ = ["TARGETS", "Content", "Target", "parse_size", "published_path", "target_format"]


@dataclass(frozen=True)
class Content:
    """What is to be written."""

    tree: dict[Any, Any]
    """The content, a ``TensorRef`` for each tensor."""
    tensors: Mapping[str, TensorEntry]
    """The tensors by the names of the ``TensorRef``s."""
    named: Mapping[str, TensorEntry]
    """The tensors by their names in a format that holds nothing else."""
    max_shard_size: int | None = None
    """Bytes of tensor data per file, for formats of several files."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format that can be written."""

    format: str
    """Its name, as ``open_layout`` reports it."""
    spellings: tuple[str, ...]
    """What ``to=`` calls it."""
    suffixes: tuple[str, ...]
    """Suffixes of a target path that ask for it."""
    tensors_only: bool
    """Whether it holds nothing but tensors."""
    what: str
    """What it is, in a few words."""
    files: Callable[[Content], dict[str, int]]
    """Bytes of tensor data by file name; the name is empty where the target is the file."""
    write: Callable[[Path, Content, bool, Progress | None], int]
    """Writes it; returns the bytes of tensor data."""


def target_format(path: Path, to: str | None, max_shard_size: int | None) -> Target:
    """Return the format to write.

    Args:
        path: Where to.
        to: Its name; by default the suffix of ``path`` says it, or ``max_shard_size``.
        max_shard_size: Bytes of tensor data per file.

    Raises:
        ConfigError: The format is unknown, or not one of several files.
    """
    if to is None and max_shard_size is not None:
        if path.suffix.lower() in _BY_SUFFIX:
            raise ConfigError(
                f"max_shard_size (--max-shard-size) writes a directory of several files; {path.name!r} is the name of "
                "one. Leave out the suffix."
            )
        to = "safetensors_index"
    if to is None:
        suffix = path.suffix.lower()
        if suffix not in _BY_SUFFIX:
            raise ConfigError(
                f"The suffix {path.suffix!r} of {path.name!r} does not say which format to write. Use .safetensors, "
                ".pth or .pt, or say it with to='safetensors' or to='pth' (--to)."
            )
        return _BY_SUFFIX[suffix]
    if to not in _BY_SPELLING:
        known = ", ".join(repr(name) for name in _BY_SPELLING)
        hint = closest(to, _BY_SPELLING, count=1) or f" Known are {known}."
        raise ConfigError(f"{to!r} is not a format to write.{hint}")
    target = _BY_SPELLING[to]
    if max_shard_size is not None and target.format != "safetensors_index":
        raise ConfigError(f"max_shard_size (--max-shard-size) is for to='safetensors_index', not {to!r}.")
    return target


def parse_size(size: int | str) -> int:
    """Return a number of bytes given as one, or as text such as ``'5GB'``, ``'500 MB'`` or ``'2GiB'``.

    Raises:
        ConfigError: It is malformed, or not positive.
    """
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    value = int(float(match[1]) * units[match[2].upper()]) if match and match[2].upper() in units else 0
    if value <= 0:
        raise ConfigError(f"{size!r} is not a size. Write a number of bytes, or such as '5GB', '500MB' or '2GiB'.")
    return value


def published_path(path: Path, written: Path) -> Path:
    """Return the path with the first eight digits of a file's SHA-256 in its name, as OpenMMLab publishes models.

    Args:
        path: Such as ``model.pth``.
        written: The file to hash.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with written.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return path.with_name(f"{path.stem}-{digest.hexdigest()[:8]}{path.suffix}")


def _size_of(tensors: Mapping[str, TensorEntry]) -> int:
    for entry in tensors.values():
        safetensors_code(entry.dtype)  # raises where it has none
    return sum(entry.nbytes for entry in tensors.values())


def _shard_sizes(content: Content) -> dict[str, int]:
    _size_of(content.named)
    shards = plan_shards(content.named, content.max_shard_size or _DEFAULT_SHARD)
    return {file: sum(content.named[name].nbytes for name in names) for file, names in shards.items()}


def _write_shards(path: Path, content: Content, verify: bool, progress: Progress | None) -> int:
    limit = content.max_shard_size or _DEFAULT_SHARD
    count = write_safetensors_shards(path, content.named, limit, verify=verify, progress=progress)
    write_manifest(path, save_id=secrets.token_hex(8), world_size=1)
    return count


_DEFAULT_SHARD = 5 * 1000**3  # bytes, as transformers' save_pretrained

TARGETS: tuple[Target, ...] = (
    Target(
        "safetensors",
        ("safetensors",),
        (".safetensors",),
        True,
        "a safetensors file",
        lambda content: {"": _size_of(content.named)},
        lambda path, content, verify, progress: write_safetensors(
            path, content.named, verify=verify, progress=progress
        ),
    ),
    Target(
        "torch_zip",
        ("pth", "pt", "torch_zip"),
        (".pth", ".pt"),
        False,
        "a file of torch.save",
        lambda content: {"": distinct_bytes(content.tree, content.tensors)},
        lambda path, content, verify, progress: write_torch_zip(
            path, content.tree, content.tensors, verify=verify, progress=progress
        ),
    ),
    Target(
        "safetensors_index",
        ("safetensors_index",),
        (),
        True,
        "a directory of safetensors files with their index and a manifest",
        _shard_sizes,
        _write_shards,
    ),
)
"""Every format that ``convert`` writes."""

_BY_SPELLING = {spelling: target for target in TARGETS for spelling in target.spellings}
_BY_SUFFIX = {suffix: target for target in TARGETS for suffix in target.suffixes}
