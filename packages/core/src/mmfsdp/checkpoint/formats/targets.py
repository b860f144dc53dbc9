"""The formats that can be written: how a target is recognised, which files it will have, and what writes them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.conversion.ranks import Ranks
from mmfsdp.checkpoint.files.planned_files import PlannedFile
from mmfsdp.checkpoint.formats.dcp_writer import plan_dcp
from mmfsdp.checkpoint.formats.rank_local_writer import plan_rank_local
from mmfsdp.checkpoint.formats.safetensors_file import plan_safetensors
from mmfsdp.checkpoint.formats.safetensors_shards import plan_safetensors_shards
from mmfsdp.checkpoint.formats.torch_zip_writer import plan_torch_zip
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.errors import ConfigError, closest

__all__ = ["TARGETS", "Content", "Target", "published_path", "target_format"]

_ONE = Ranks(1, 1)


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
    ranks: Ranks = _ONE
    """How many ranks, for formats with files per rank."""
    save_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies what is written; every file of it carries the same."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format that can be written."""

    format: str
    """Its name, as ``open_layout`` reports it."""
    spellings: tuple[str, ...]
    """What ``to=`` calls it."""
    suffixes: tuple[str, ...]
    """Suffixes of a target path that ask for it."""
    what: str
    """What it is, in a few words."""
    plan: Callable[[Content], list[PlannedFile]]
    """Says what its files will hold."""
    tensors_only: bool = False
    """Whether it holds nothing but tensors."""
    directory: bool = False
    """Whether it is a directory, which gets a manifest."""
    by_rank: bool = False
    """Whether its files are of ranks."""
    flat: bool = False
    """Whether bare weights lie at its top, without a key above."""
    optimizer_names: bool = False
    """Whether optimizer state goes by the names of the parameters, and not by their numbers."""


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
                ".pth or .pt, or say it with to= (--to): 'safetensors', 'pth', 'dcp' or 'local'."
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


_DEFAULT_SHARD = 5 * 1000**3  # bytes, as transformers' save_pretrained

TARGETS: tuple[Target, ...] = (
    Target(
        "safetensors",
        ("safetensors",),
        (".safetensors",),
        "a safetensors file",
        lambda content: [plan_safetensors("", content.named)],
        tensors_only=True,
    ),
    Target(
        "torch_zip",
        ("pth", "pt", "torch_zip"),
        (".pth", ".pt"),
        "a file of torch.save",
        lambda content: [plan_torch_zip("", content.tree, content.tensors)],
    ),
    Target(
        "safetensors_index",
        ("safetensors_index",),
        (),
        "a directory of safetensors files with their index and a manifest",
        lambda content: plan_safetensors_shards(content.named, content.max_shard_size or _DEFAULT_SHARD),
        tensors_only=True,
        directory=True,
    ),
    Target(
        "dcp",
        ("dcp", "sharded"),
        (),
        "a directory of torch's distributed checkpoint (DCP), with a manifest",
        lambda content: plan_dcp(content.tree, content.tensors, content.ranks),
        directory=True,
        by_rank=True,
        flat=True,
        optimizer_names=True,
    ),
    Target(
        "rank_local",
        ("local", "rank_local"),
        (),
        "a directory with a file of torch.save per rank, and a manifest",
        lambda content: plan_rank_local(content.tree, content.tensors, content.ranks, content.save_id),
        directory=True,
        by_rank=True,
    ),
)
"""Every format that ``convert`` writes."""

_BY_SPELLING = {spelling: target for target in TARGETS for spelling in target.spellings}
_BY_SUFFIX = {suffix: target for target in TARGETS for suffix in target.suffixes}
