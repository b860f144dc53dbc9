"""Reads a LoRA adapter as peft saves it: which modules it changes, by which factors, and which tensors it replaces."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.arithmetic.factors import Factors, FactorTable, check_settings, trained_modules
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.failed_downloads import explained
from mmfsdp.checkpoint.files.disk import nearest, refuse_empty
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.integrity import parse_json
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["PREFIX", "Adapter", "read_adapter"]

_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
"""Prefix that peft puts in front of the names of a base."""
_LIMIT = 1 << 20  # bytes of a config
# What torch.compile, recomputation and FSDP1 put into the names of a model that they wrap.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
# What peft puts between a module and its weights; its save_pretrained() leaves out the adapter's name.
_PEFT_STEPS = re.compile(r"\.base_layer\.|\.modules_to_save\.[^.]+\.")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter."""

    layout: Layout
    """Its file of tensors."""
    config: Path
    """The file with its settings."""
    base_name: str
    """The base that the config names, which may be empty."""
    factors: Mapping[str, Factors]
    """Module to the factors of the matrix that is added to its weight."""
    replaced: Mapping[str, TensorEntry]
    """Name to tensor that takes the place of the base's: ``modules_to_save`` and trained biases."""
    targets: tuple[str, ...]
    """The ends of the names of all modules that were trained, if the config lists them so."""

    def lacks(self, module: str) -> bool:
        """Tell whether the config says that a module of the base was trained, and the adapter lacks it."""
        trained = any(f".{module}".endswith(f".{target}") for target in self.targets)
        return trained and module not in self.factors and f"{module}.weight" not in self.replaced


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``); no tensor data.

    Raises:
        CheckpointNotFoundError: One of the files is missing.
        ConfigError: The path is empty.
        FormatError: It is an adapter of another method than LoRA, or of a variant that cannot be merged here.
        CorruptCheckpointError: The files contradict each other.
        IncompleteCheckpointError: A tensor has no element.
    """
    refuse_empty(path)
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    config = folder / _CONFIG
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if not config.is_file() or file is None:
        missing = _CONFIG if not config.is_file() else _FILES[0]
        raise CheckpointNotFoundError(
            f"There is no LoRA adapter at {str(path)!r}: {missing} is missing. Give the folder that peft's "
            f"save_pretrained() or diffusers' save_lora_weights() wrote.{'' if folder.exists() else nearest(folder)}",
            file=str(path),
        )
    settings = _settings(config)
    layout = open_layout(file)
    table = FactorTable(file, "peft")
    replaced: dict[str, TensorEntry] = {}
    for stored, entry in part_tensors(layout, "model").items():
        _refuse_empty_tensor(stored, entry, file)
        name = _WRAPPERS.sub("", stored).removeprefix(PREFIX)
        if ".original_module." not in name and not table.take(name, entry, stored):
            replaced[_PEFT_STEPS.sub(".", name)] = entry
    factors = table.factors(settings, config)
    if not factors and not replaced:
        raise FormatError(f"{file.name} holds no tensor of an adapter.", file=str(file))
    name = str(settings.get("base_model_name_or_path") or "")
    return Adapter(layout, config, name, factors, replaced, trained_modules(settings))


def _refuse_empty_tensor(name: str, entry: TensorEntry, file: Path) -> None:
    if 0 in entry.shape:
        raise IncompleteCheckpointError(
            f"{file.name} holds {name!r} of shape {[*entry.shape]}, which has no element: ZeRO-3 keeps a parameter so "
            "on each rank, and the adapter was saved without gathering it. Save it again with "
            "stage3_gather_16bit_weights_on_model_save, or within deepspeed.zero.GatheredParameters.",
            file=str(file),
        )


def _settings(config: Path) -> dict[str, Any]:
    try:
        if config.stat().st_size > _LIMIT:
            raise ValueError(f"it is larger than {_LIMIT} bytes")
        settings = parse_json(config.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("it is not a mapping")
    except (ValueError, RecursionError) as error:
        damage = CorruptCheckpointError(f"{config.name} is damaged: {error}.", file=str(config))
        raise explained(damage) from error
    check_settings(settings, config)
    return settings
