"""The formats that can be written: how a target is recognised, which files it will have, and what writes them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mmfsdp.checkpoint.conversion.ranks import Ranks
from mmfsdp.checkpoint.files.planned_files import PlannedFile
from mmfsdp.checkpoint.formats.dcp_writer import plan_dcp
from mmfsdp.checkpoint.formats.rank_local_writer import plan_rank_local
from mmfsdp.checkpoint.formats.safetensors_file import plan_safetensors
from mmfsdp.checkpoint.formats.safetensors_shards import plan_safetensors_shards
from mmfsdp.checkpoint.formats.torch_zip_writer import plan_torch_zip
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.errors import ConfigError, closest

__all__ = ["TARGETS", "Content", "Target", "TargetSettings", "check_target_name", "published_path", "target_format"]

_ONE = Ranks(1, 1)


class TargetSettings(Protocol):
    """The settings of a conversion that the format to write must fit."""

    @property
    def to(self) -> str | None: ...
    @property
    def max_shard_size(self) -> int | None: ...


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


def check_target_name(name: str) -> str:
    """Return the name of a format to write as it was given.

    Raises:
        ConfigError: There is no such format; the message suggests the nearest names.
    """
    if name not in _BY_SPELLING:
        known = ", ".join(repr(name) for name in _BY_SPELLING)
        hint = closest(name, _BY_SPELLING, count=1) or f" Accepted: {known}."
        raise ConfigError(f"{name!r} is not a format to write.{hint}")
    return name


def target_format(path: Path, conversion: TargetSettings) -> Target:
    """Return the format to write.

    Args:
        path: Where to write.
        conversion: The settings; ``to``, else ``max_shard_size``, else the suffix of ``path`` sets the format.

    Raises:
        ConfigError: The suffix does not name a format, or a setting does not fit the format.
    """
    by_suffix = _BY_SUFFIX.get(path.suffix.lower())
    if conversion.to is not None:
        target = _BY_SPELLING[check_target_name(conversion.to)]
    elif conversion.max_shard_size is None and by_suffix is not None:
        target = by_suffix
    elif conversion.max_shard_size is None:
        raise ConfigError(
            f"The suffix {path.suffix!r} of {path.name!r} does not name a format. Use .safetensors, .pth or .pt, or "
            "set 'to' to 'safetensors', 'pth', 'dcp' or 'local'."
        )
    elif by_suffix is not None:
        raise ConfigError(
            f"'max_shard_size' writes a directory of several files, but {path.name!r} has the suffix of a file. Leave "
            "out the suffix."
        )
    else:
        target = _BY_SPELLING["safetensors_index"]
    name = target.spellings[0]
    for setting, fits, needed in (
        ("max_shard_size", target.format == "safetensors_index", "'safetensors_index'"),
        ("publish", not target.directory, "a single file"),
        ("ranks", target.by_rank, "'dcp' or 'local'"),
    ):
        if getattr(conversion, setting) and not fits:
            raise ConfigError(f"{setting!r} applies only to the format {needed}, not to {name!r}.")
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
