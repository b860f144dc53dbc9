"""Reads a LoRA adapter as diffusers saves it: one file with the factors for several components of a pipeline.

diffusers gives the names, and a scale of 1 to a file without settings
(https://github.com/huggingface/diffusers): ``loaders/lora_base.py``, ``utils/state_dict_utils.py`` and
``utils/peft_utils.py`` in ``src/diffusers``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.arithmetic.adapters import Adapter
from mmfsdp.checkpoint.arithmetic.factors import FactorTable, check_settings, trained_modules
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.formats.safetensors.safetensors_files import read_entries
from mmfsdp.checkpoint.integrity import parse_json
from mmfsdp.errors import ConfigError, FormatError

__all__ = ["diffusers_file", "read_diffusers_adapter"]

_FILE = "pytorch_lora_weights.safetensors"
_SETTINGS = "lora_adapter_metadata"
_COMPONENT = re.compile(r"((?:unet|transformer|text_encoder)(?:_\d)?)\.(.+)")
_SIDE = re.compile(r"\.lora(?:_linear_layer)?\.(down|up)(?=\.weight$)")


def diffusers_file(path: str | os.PathLike[str]) -> Path | None:
    """Return the file of an adapter in diffusers' layout, given itself or its folder; ``None`` if it is another."""
    given = Path(path)
    if given.is_dir():
        return given / _FILE if (given / _FILE).is_file() else None
    beside = given.with_name("adapter_config.json")
    return given if given.suffix == ".safetensors" and given.is_file() and not beside.exists() else None


def read_diffusers_adapter(file: Path, component: str | None, folder: str) -> Adapter:
    """Read what the adapter adds to one component of a pipeline; no tensor data.

    Args:
        file: What ``save_lora_weights`` of diffusers wrote.
        component: ``'unet'``, ``'transformer'``, ``'text_encoder_2'`` or the like; ``None`` for the only one, or the
            one that ``folder`` names.
        folder: The name of the base's folder.

    Raises:
        ConfigError: The adapter is not for that component, or is for several.
        FormatError: It is of another method than LoRA, or names tensors as another program does.
        CorruptCheckpointError: The file is damaged, or contradicts its settings.
    """
    layout = open_layout(file)
    parts: dict[str, dict[str, str]] = {}
    for stored in layout.tensors:
        match = _COMPONENT.fullmatch(stored)
        if match is None:
            raise FormatError(
                f"{file.name} holds {stored!r}, which does not begin with a component of a pipeline, as in the files "
                "of diffusers: 'unet.', 'transformer.' or 'text_encoder.'. Load it into the pipeline with diffusers' "
                "load_lora_weights(), and save it from there.",
                file=str(file),
            )
        parts.setdefault(match[1], {})[stored] = match[2]
    chosen = _component(parts, component, folder, file)
    table = FactorTable(file, "diffusers")
    for stored, name in parts[chosen].items():
        named = _SIDE.sub(lambda side: ".lora_A" if side[1] == "down" else ".lora_B", name)
        if not table.take(named, layout.tensors[stored], stored):
            raise FormatError(
                f"{file.name} holds {stored!r}, which is not a factor of LoRA. Merge it with diffusers: fuse_lora().",
                file=str(file),
            )
    settings = _settings(file, chosen)
    factors, known = table.factors(settings, file), settings or {}
    return Adapter(layout, file, str(known.get("base_model_name_or_path") or ""), factors, {}, trained_modules(known))


def _component(parts: Mapping[str, Any], component: str | None, folder: str, file: Path) -> str:
    if not parts:
        raise FormatError(f"{file.name} holds no tensor of an adapter.", file=str(file))
    wanted = component or (folder if folder in parts else next(iter(parts)) if len(parts) == 1 else None)
    if wanted is None:
        raise ConfigError(
            f"{file.name} has factors for {name_list([*parts])}: set {argument('component')} to the one that the base "
            "is.",
            file=str(file),
        )
    if wanted not in parts:
        raise ConfigError(f"{file.name} has no factors for {wanted!r}, but for {name_list([*parts])}.", file=str(file))
    return wanted


def _settings(file: Path, component: str) -> dict[str, Any] | None:
    """Return peft's settings of a component, which newer releases of diffusers keep in the header."""
    _, metadata = read_entries(file)
    if _SETTINGS not in metadata:
        return None
    prefix = f"{component}."
    try:
        settings = parse_json(metadata[_SETTINGS].encode())
        if not isinstance(settings, dict):
            raise ValueError("it is not a mapping")
        own = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
        if not own:
            raise ValueError(f"it says nothing of {component!r}")
    except (ValueError, RecursionError) as error:
        raise damaged(f"{_SETTINGS} of {file.name}", str(error), file) from error
    check_settings(own, file)
    return own
