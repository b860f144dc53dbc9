"""Reads a LoRA adapter as peft saves it: which modules it changes, by which factors, and which tensors it replaces.

The files and their meaning are those of peft (https://github.com/huggingface/peft): ``src/peft/tuners/lora/config.py``
and ``layer.py``, and ``src/peft/utils/save_and_load.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.files.disk import nearest
from mmfsdp.checkpoint.formats.registry import open_layout
from mmfsdp.checkpoint.integrity import parse_json
from mmfsdp.checkpoint.layout import Layout, TensorEntry
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError

__all__ = ["Adapter", "Factors", "read_adapter"]

_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
_LIMIT = 1 << 20  # bytes of a config

# Settings that change what is added to the weights, and what peft calls them.
_OTHER_METHODS = {
    "use_dora": "DoRA (it also scales each row)",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "LoRA with a bias",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on single parameters (target_parameters)",
    "trainable_token_indices": "trainable tokens",
    "alora_invocation_tokens": "activated LoRA, which must not be merged",
    "arrow_config": "Arrow routing, which must not be merged",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
# Ways to begin that change the base weights: the adapter fits those, and not the base as it was published.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to the weight of one module: ``scale * B @ A``, or that transposed."""

    a: TensorEntry
    """The factor of shape ``(rank, in, ...)``."""
    b: TensorEntry
    """The factor of shape ``(out, rank, ...)``."""
    scale: float
    """``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    transposed: bool
    """Whether the weight's first dimension is that of A: embeddings, and layers such as GPT-2's ``Conv1D``."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter."""

    layout: Layout
    """Its file of tensors."""
    config: Path
    """Its config."""
    base_name: str
    """The base that the config names, which may be empty."""
    factors: Mapping[str, Factors]
    """Module to what is added to its weight."""
    replaced: Mapping[str, TensorEntry]
    """Name to tensor that takes the place of the base's: ``modules_to_save`` and trained biases."""
    targets: tuple[str, ...]
    """The ends of the names of all modules that were trained, if the config lists them so."""

    def lacks(self, module: str) -> bool:
        """Tell whether a module of the base was trained by the config, and is not in the adapter."""
        trained = any(f".{module}".endswith(f".{target}") for target in self.targets)
        return trained and module not in self.factors and f"{module}.weight" not in self.replaced


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``); no tensor data.

    Raises:
        CheckpointNotFoundError: One of the files is missing.
        FormatError: It is an adapter of another method than LoRA, or of a variant that cannot be merged here.
        CorruptCheckpointError: The files contradict each other.
    """
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    config = folder / _CONFIG
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if not config.is_file() or file is None:
        missing = _CONFIG if not config.is_file() else _FILES[0]
        raise CheckpointNotFoundError(
            f"There is no LoRA adapter at {str(path)!r}: {missing} is missing. Give the folder that peft's "
            f"save_pretrained() wrote.{'' if folder.exists() else nearest(folder)}",
            file=str(path),
        )
    settings = _settings(config)
    layout = open_layout(file)
    found: dict[str, dict[str, TensorEntry]] = {}
    replaced: dict[str, TensorEntry] = {}
    embeddings = set()
    for stored, entry in part_tensors(layout, "model").items():
        name = stored.removeprefix(_PREFIX)
        if "lora_magnitude_vector" in name or ".trainable_tokens_" in name:
            method = "trainable tokens" if "tokens" in name else "DoRA"
            raise FormatError(
                f"{file.name} holds {stored!r}, which is of {method}. Merge it with peft.", file=str(file)
            )
        if match := _FACTOR.fullmatch(name):
            sides = found.setdefault(match["module"], {})
            if match["side"] in sides:
                raise CorruptCheckpointError(
                    f"{file.name} holds lora_{match['side']} of {match['module']!r} twice, as {stored!r} and under "
                    "another name.",
                    file=str(file),
                )
            sides[match["side"]] = entry
            embeddings |= {match["module"]} if match["embedding"] else set()
        elif ".lora_" in name:
            raise FormatError(
                f"{file.name} holds {stored!r}, which is unknown here. Merge it with peft.", file=str(file)
            )
        else:
            replaced[name.replace(".base_layer.", ".")] = entry
    factors = {module: _factors(module, sides, settings, module in embeddings, file) for module, sides in found.items()}
    if not factors and not replaced:
        raise FormatError(f"{file.name} holds no tensor of an adapter.", file=str(file))
    name = str(settings.get("base_model_name_or_path") or "")
    return Adapter(layout, config, name, factors, replaced, _targets(settings))


def _settings(config: Path) -> dict[str, Any]:
    try:
        if config.stat().st_size > _LIMIT:
            raise ValueError(f"it is larger than {_LIMIT} bytes")
        settings = parse_json(config.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("it is not a mapping")
        for name in ("alpha_pattern", "rank_pattern"):
            if not isinstance(settings.get(name) or {}, dict):
                raise ValueError(f"{name} is not a mapping")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{config.name} is damaged: {error}.", file=str(config)) from error
    kind = settings.get("peft_type")
    method = next((text for name, text in _OTHER_METHODS.items() if settings.get(name)), None)
    if kind != "LORA":
        method = f"of type {kind!r}"
    elif method is not None:
        method = f"of {method}"
    if method is not None:
        raise FormatError(
            f"The adapter is {method}; only LoRA and rsLoRA are merged here. Merge it with peft: merge_and_unload().",
            file=str(config),
        )
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGES_BASE):
        raise FormatError(
            f"The adapter began with init_lora_weights={begun!r}, which changes the base weights, so it does not fit "
            "the base as it was published. Save it with peft's path_initial_model_for_weight_conversion first, or "
            "merge it with peft.",
            file=str(config),
        )
    return settings


def _targets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ends of names of modules that were trained; none if the config says it in another way."""
    targets, limits = settings.get("target_modules"), ("exclude_modules", "layers_to_transform", "layers_pattern")
    listed = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    return tuple(targets) if listed and targets and not any(map(settings.get, limits)) else ()


def _factors(
    module: str, sides: Mapping[str, TensorEntry], settings: Mapping[str, Any], embedding: bool, file: Path
) -> Factors:
    if {*sides} != {"A", "B"}:
        raise CorruptCheckpointError(
            f"{file.name} holds lora_{next(iter(sides))} of {module!r} but not the other factor.", file=str(file)
        )
    a, b = sides["A"], sides["B"]
    config = file.with_name(_CONFIG)
    rank = _of_module(module, settings.get("rank_pattern"), settings.get("r"), config)
    if type(rank) is not int or rank < 1:
        raise CorruptCheckpointError(
            f"{_CONFIG} gives {module!r} the rank {rank!r} as 'r' or in 'rank_pattern' (expected a number such as "
            f"{a.shape[0] if a.shape else 8}).",
            file=str(config),
        )
    if len(a.shape) < 2 or len(b.shape) < 2 or not rank == a.shape[0] == b.shape[1] or max((1, *b.shape[2:])) > 1:
        raise CorruptCheckpointError(
            f"The factors of {module!r} have shapes {list(a.shape)} and {list(b.shape)} (expected rank {rank}, as "
            f"{_CONFIG} says).",
            file=str(file),
        )
    alpha = _of_module(module, settings.get("alpha_pattern"), settings.get("lora_alpha"), config)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CorruptCheckpointError(
            f"{_CONFIG} gives {module!r} alpha {alpha!r} as 'lora_alpha' or in 'alpha_pattern' (expected a number).",
            file=str(config),
        )
    scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    return Factors(a, b, scale, embedding or bool(settings.get("fan_in_fan_out")))


def _of_module(module: str, patterns: Any, default: Any, config: Path) -> Any:
    """Return what a table of patterns gives a module: the first that matches the end of its name, as in peft."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error as error:
            raise CorruptCheckpointError(
                f"{_CONFIG} holds the pattern {pattern!r}, which is malformed: {error}.", file=str(config)
            ) from error
    return default
