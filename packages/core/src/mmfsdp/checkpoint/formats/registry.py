"""Lists every checkpoint format.

A new format is one module in this folder, one function in ``readers.py``, one in ``writers.py`` if it can be written,
and one entry in ``FORMATS``. The module has ``read(source) -> Layout`` and ``plan_write(content)``, which plans files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.checkpoint.formats import readers, writers
from mmfsdp.checkpoint.formats.format import Format
from mmfsdp.checkpoint.formats.model_forms import FolderForm, LlamaFileForm
from mmfsdp.checkpoint.formats.source import (
    INDEX_SUFFIX,
    MODEL_FILES,
    OF_DEEPSPEED,
    RANK_FILE,
    TORCH_FILE,
    Source,
    all_parts,
    is_legacy_torch,
    is_zip,
    looks_like_safetensors,
)
from mmfsdp.errors import ConfigError, closest

__all__ = ["FORMATS", "FormatInfo", "find_format", "format_named", "format_of_suffix", "known_formats"]

_EIGHT_BIT = ("fp8", "fp8_channel", "fp8_tensor")
_ITEM_OF_RANK = re.compile(r".+_0\.pt", re.ASCII)
_NAMED_RANK_FILE = re.compile(r".*rank[_-]?\d{1,9}\.(pt|pth|bin)", re.ASCII)
_SHARD_FILE = re.compile(r".*shard[_-]?\d{1,9}\.(pt|pth|bin|torch)|.+[_-]\d{1,9}\.torch", re.ASCII)


def _has_rank_files(source: Source) -> bool:
    return any(RANK_FILE.fullmatch(name) for name in source.names)


def _has_index(source: Source) -> bool:
    if source.head.lstrip().startswith(b"{") or any(name.endswith(INDEX_SUFFIX) for name in source.names):
        return True
    return bool(all_parts(source.names, ".safetensors"))  # whose index was lost


def _is_of_deepspeed(source: Source) -> bool:
    if any(name.endswith(OF_DEEPSPEED) for name in source.names):
        return True
    return any((source.path / name).is_file() for name in source.names if name in ("latest", "latest_universal"))


def _is_model_folder(source: Source) -> bool:
    return "config.json" in source.names and not {*MODEL_FILES}.isdisjoint(source.names)


def _is_torch_folder(source: Source) -> bool:
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in source.names):
        return False
    return TORCH_FILE in source.names or bool(all_parts(source.names, ".bin"))


# The first whose `sniff` says yes reads a path: a directory may hold several.
FORMATS: tuple[Format, ...] = (
    Format(
        "safetensors",
        "a safetensors file",
        readers.safetensors,
        lambda source: looks_like_safetensors(source.head),
        writer=writers.safetensors,
        suffixes=(".safetensors",),
        tensors_only=True,
        quantizes=_EIGHT_BIT,
    ),
    Format(
        "torch_zip",
        "a file of torch.save",
        readers.torch_zip,
        lambda source: is_zip(source.head),
        writer=writers.torch_zip,
        aliases=("pth", "pt"),
        suffixes=(".pth", ".pt"),
        mappable=True,
    ),
    Format(
        "rank_local",
        "a directory with a file of torch.save per rank, and a manifest",
        readers.rank_local,
        _has_rank_files,
        writer=writers.rank_local,
        aliases=("local",),
        directory=True,
        by_rank=True,
        names_its_save=True,
    ),
    Format(
        "megatron",
        "a directory of Megatron-Core's torch_dist: DCP with metadata.json, and optimizer state by other names",
        readers.megatron,
        lambda source: ".metadata" in source.names and "metadata.json" in source.names,
        directory=True,
        of_dcp=True,
    ),
    Format(
        "dcp",
        "a directory of torch's distributed checkpoint (DCP), with a manifest",
        readers.dcp,
        lambda source: ".metadata" in source.names,
        writer=writers.dcp,
        aliases=("sharded",),
        directory=True,
        by_rank=True,
        flat=True,
        optimizer_names=True,
        of_dcp=True,
    ),
    Format(
        "huggingface",
        "a folder that from_pretrained of transformers loads: safetensors, config and tokenizer",
        readers.huggingface,
        _is_model_folder,
        writer=writers.huggingface,
        aliases=("hf",),
        directory=True,
        tensors_only=True,
        quantizes=_EIGHT_BIT,
        divides=True,
        of_model=True,
        model_form=FolderForm,
        like="Hugging Face folder",
    ),
    Format(
        "safetensors_index",
        "a directory of safetensors files with their index and a manifest",
        readers.safetensors_index,
        _has_index,
        writer=writers.safetensors_index,
        directory=True,
        tensors_only=True,
        quantizes=_EIGHT_BIT,
        divides=True,
        of_model=True,
    ),
    Format(
        "torch_index",
        "a directory of torch.save files of Hugging Face: pytorch_model.bin, or several and their index",
        readers.torch_index,
        _is_torch_folder,
        directory=True,
        of_model=True,
    ),
    Format(
        "fairscale",
        "a directory with a file per rank of fairscale's FSDP: its local state dict, and the metadata",
        readers.fairscale,
        lambda source: any(_SHARD_FILE.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "dtensor_ranks",
        "a directory with a file of torch.save per rank that holds DTensors, as verl, accelerate and scripts do",
        readers.dtensor_ranks,
        lambda source: any(_NAMED_RANK_FILE.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "torch_checkpointing",
        "a directory of Meta's torch_checkpointing, with a file of torch.save per item and rank",
        readers.torch_checkpointing,
        lambda source: any(_ITEM_OF_RANK.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "safetensors_ranks",
        "a directory of safetensors files per rank, as torch's HuggingFaceStorageWriter leaves them",
        readers.safetensors_ranks,
        lambda source: any(name.endswith(".safetensors") for name in source.names),
        directory=True,
        lone_ranks=True,
    ),
    Format(
        "mmengine_local",
        "a directory with a file of torch.save per rank from FSDP1, as stock MMEngine 0.8 to 0.10 saves it",
        readers.mmengine_local,
        directory=True,
    ),
    Format(
        "deepspeed",
        "a directory of DeepSpeed: ZeRO stages 0 to 3, a universal checkpoint, or the one with its file latest",
        readers.deepspeed,
        _is_of_deepspeed,
        directory=True,
    ),
    Format(
        "dcp_flat",
        "a DCP directory of FSDP1's local state dicts: parts of flat parameters",
        readers.dcp_flat,
        directory=True,
        of_dcp=True,
    ),
    Format(
        "torch_legacy",
        "a file of torch.save before version 1.6",
        readers.torch_legacy,
        lambda source: is_legacy_torch(source.head),
    ),
    Format(
        "gguf",
        "a GGUF file of a Llama-like model, which llama.cpp loads",
        None,
        writer=writers.gguf,
        suffixes=(".gguf",),
        tensors_only=True,
        model_form=LlamaFileForm,
        like="GGUF file",
        quantizes=("q8_0",),
        numbers_only=True,
    ),
)
"""Every format, in the order in which they are tried."""


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
        FormatInfo(
            item.name, item.description, item.reader is not None, item.writer is not None, item.suffixes, item.aliases
        )
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


def format_named(name: str) -> Format | None:
    """Return the format that a ``Layout`` says it is of; ``None`` for what was not read, such as a live model."""
    return next((item for item in FORMATS if item.name == name), None)
