"""Lists every checkpoint format.

A new format is a class in a module ``format.py``, in the folder of its reader and writer, and an entry in ``FORMATS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.dcp.format import DcpFlatFormat, DcpFormat, MegatronFormat
from mmfsdp.checkpoint.formats.deepspeed.format import DeepSpeedFormat
from mmfsdp.checkpoint.formats.gguf.format import GgufFormat
from mmfsdp.checkpoint.formats.huggingface.format import HuggingFaceFormat, SafetensorsIndexFormat, TorchIndexFormat
from mmfsdp.checkpoint.formats.per_rank.format import (
    DTensorRanksFormat,
    FairscaleFormat,
    MMEngineLocalFormat,
    RankLocalFormat,
    TorchCheckpointingFormat,
)
from mmfsdp.checkpoint.formats.safetensors.format import SafetensorsFormat, SafetensorsRanksFormat
from mmfsdp.checkpoint.formats.torch_files.format import TorchLegacyFormat, TorchZipFormat
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import ConfigError, closest

__all__ = ["FORMATS", "FormatInfo", "find_format", "format_of", "format_of_suffix", "known_formats"]

FORMATS: tuple[Format, ...] = (
    SafetensorsFormat(),
    TorchZipFormat(),
    RankLocalFormat(),
    MegatronFormat(),
    DcpFormat(),
    HuggingFaceFormat(),
    SafetensorsIndexFormat(),
    TorchIndexFormat(),
    FairscaleFormat(),
    DTensorRanksFormat(),
    TorchCheckpointingFormat(),
    SafetensorsRanksFormat(),
    MMEngineLocalFormat(),
    DeepSpeedFormat(),
    DcpFlatFormat(),
    TorchLegacyFormat(),
    GgufFormat(),
)
"""Every format. The first that recognises a path reads it: a directory may hold several."""

_NOT_READ = Format()


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format of checkpoints, for people and for JSON."""

    name: str
    """Its name: what ``to`` and ``source_format`` accept."""
    description: str
    """A description in a few words."""
    reads: bool
    """Whether ``open_layout`` reads it. Whatever can be read can be converted to whatever can be written, to
    ``gguf`` if the model is like Llama."""
    writes: bool
    """Whether ``convert`` writes it."""
    suffixes: tuple[str, ...]
    """Suffixes of a target that ask for it."""
    aliases: tuple[str, ...]
    """Other names that are accepted for it."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def known_formats() -> list[FormatInfo]:
    """Return the formats, those that can be written first. All of them can be read, but for ``gguf``."""
    infos = [
        FormatInfo(item.name, item.description, item.reads, item.writes, item.suffixes, item.aliases)
        for item in FORMATS
    ]
    return sorted(infos, key=lambda info: not info.writes)


def find_format(name: str, among: Iterable[Format] = FORMATS, what: str = "format") -> Format:
    """Return a format by its name or an alias.

    Args:
        name: The name.
        among: The formats that are possible.
        what: What those are, for the message: ``'format to write'``.

    Raises:
        ConfigError: There is no such format; the message suggests the nearest names.
    """
    names = {spelling: item for item in among for spelling in (item.name, *item.aliases)}
    if name not in names:
        hint = closest(name, names, count=1) or f" Accepted: {', '.join(map(repr, names))}."
        raise ConfigError(f"{name!r} is not a {what}.{hint}")
    return names[name]


def format_of_suffix(suffix: str) -> Format | None:
    """Return the format that a target's suffix, such as ``'.pth'``, asks for; ``None`` if there is none."""
    return next((item for item in FORMATS if suffix.lower() in item.suffixes), None)


def format_of(layout: Layout) -> Format:
    """Return the format that a layout was read from; for what was not read, such as a live model, a base `Format`."""
    return next((item for item in FORMATS if item.name == layout.format), _NOT_READ)
