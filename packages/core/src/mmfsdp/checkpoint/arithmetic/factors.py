"""The factors of a LoRA adapter, by module, and what peft's settings make of them.

peft (https://github.com/huggingface/peft) defines their names and meaning: ``src/peft/tuners/lora/config.py`` and
``layer.py``, and ``src/peft/utils/save_and_load.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.arithmetic.module_patterns import of_modules
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["FactorTable", "Factors", "check_settings", "trained_modules"]

# A state dict that was not saved by peft's save_pretrained has the adapter's own name in each: `lora_A.default.weight`.
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?P<adapter>(?!weight$)[^.]+))?(\.weight)?"
)

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
    """An adapter's addition to the weight of one module: ``scale * B @ A``, or its transpose."""

    a: TensorEntry
    """The factor of shape ``(rank, in, ...)``."""
    b: TensorEntry
    """The factor of shape ``(out, rank, ...)``."""
    scale: float
    """``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    transposed: bool
    """Whether the weight shares its first dimension with A: embeddings, and layers such as GPT-2's ``Conv1D``."""


class FactorTable:
    """Collects the factors of an adapter's modules.

    Args:
        file: The file that holds them, for messages.
        library: Who can merge what is not known here: ``'peft'``.
    """

    def __init__(self, file: Path, library: str) -> None:
        self._file, self._library = file, library
        self._found: dict[str, dict[str, TensorEntry]] = {}
        self._embeddings: set[str] = set()
        self._adapters: set[str | None] = set()

    def take(self, name: str, entry: TensorEntry, stored: str) -> bool:
        """Note a tensor if it is a factor, and tell whether it is one.

        Args:
            name: Its name, with the module's in the base and peft's ending: ``'layers.0.q_proj.lora_A.weight'``.
            entry: The tensor.
            stored: Its name in the file.

        Raises:
            FormatError: It is of another method.
            CorruptCheckpointError: The module has this factor already.
        """
        if "lora_magnitude_vector" in name or ".trainable_tokens_" in name:
            method = "trainable tokens" if "tokens" in name else "DoRA"
            raise FormatError(
                f"{self._file.name} holds {stored!r}, which is of {method}. Merge it with {self._library}.",
                file=str(self._file),
            )
        match = _FACTOR.fullmatch(name)
        if match is None and ".lora_" in name:
            raise FormatError(
                f"{self._file.name} holds {stored!r}, which is unknown here. Merge it with {self._library}.",
                file=str(self._file),
            )
        if match is None:
            return False
        self._adapters.add(match["adapter"])
        if len(self._adapters) > 1:
            raise FormatError(
                f"{self._file.name} holds factors of several adapters: {name_list(sorted(map(str, self._adapters)))}. "
                "Save the one to merge with save_pretrained(path, selected_adapters=[name]).",
                file=str(self._file),
            )
        sides = self._found.setdefault(match["module"], {})
        if match["side"] in sides:
            raise CorruptCheckpointError(
                f"{self._file.name} holds lora_{match['side']} of {match['module']!r} twice, as {stored!r} and under "
                "another name.",
                file=str(self._file),
            )
        sides[match["side"]] = entry
        self._embeddings |= {match["module"]} if match["embedding"] else set()
        return True

    def factors(self, settings: Mapping[str, Any] | None, config: Path) -> dict[str, Factors]:
        """Return each module's factors and their scale.

        Args:
            settings: peft's; ``None`` if alpha is the rank of each module, so that the scale is 1.
            config: Where they lie, for messages.

        Raises:
            CorruptCheckpointError: A factor is missing, or contradicts the settings.
        """
        given = settings or {}
        tables = ("rank_pattern", "alpha_pattern")
        ranks, alphas = (of_modules([*self._found], given.get(name) or {}, name, config) for name in tables)
        found = {}
        for module, sides in self._found.items():
            if {*sides} != {"A", "B"}:
                raise CorruptCheckpointError(
                    f"{self._file.name} holds lora_{next(iter(sides))} of {module!r} but not the other factor.",
                    file=str(self._file),
                )
            rank = sides["A"].shape[0] if sides["A"].shape else 8
            own = {**(settings if settings is not None else {"r": rank, "lora_alpha": rank})}
            own["r"], own["lora_alpha"] = ranks.get(module, own.get("r")), alphas.get(module, own.get("lora_alpha"))
            found[module] = self._scaled(module, sides["A"], sides["B"], own, config)
        return found

    def _scaled(
        self, module: str, a: TensorEntry, b: TensorEntry, settings: Mapping[str, Any], config: Path
    ) -> Factors:
        expected, rank, alpha = a.shape[0] if a.shape else 8, settings["r"], settings["lora_alpha"]
        if type(rank) is not int or rank < 1:
            raise CorruptCheckpointError(
                f"{config.name} gives {module!r} the rank {rank!r} as 'r' or in 'rank_pattern' (expected a number "
                f"such as {expected}).",
                file=str(config),
            )
        if len(a.shape) < 2 or len(b.shape) < 2 or not rank == a.shape[0] == b.shape[1] or max((1, *b.shape[2:])) > 1:
            raise CorruptCheckpointError(
                f"The factors of {module!r} have shapes {list(a.shape)} and {list(b.shape)} (expected rank {rank}, as "
                f"{config.name} says).",
                file=str(self._file),
            )
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise CorruptCheckpointError(
                f"{config.name} gives {module!r} alpha {alpha!r} as 'lora_alpha' or in 'alpha_pattern' (expected a "
                "number).",
                file=str(config),
            )
        scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
        return Factors(a, b, scale, module in self._embeddings or bool(settings.get("fan_in_fan_out")))


def check_settings(settings: Mapping[str, Any], config: Path) -> None:
    """Check that peft's settings are of a method that is merged here.

    Raises:
        FormatError: It is another method than LoRA, or a variant that cannot be merged here.
        CorruptCheckpointError: They are malformed.
    """
    for name in ("alpha_pattern", "rank_pattern"):
        if not isinstance(settings.get(name) or {}, dict):
            raise CorruptCheckpointError(f"{config.name} is damaged: {name} is not a mapping.", file=str(config))
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


def trained_modules(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ends of names of modules that were trained; none if the config says it in another way."""
    targets, limits = settings.get("target_modules"), ("exclude_modules", "layers_to_transform", "layers_pattern")
    listed = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    return tuple(targets) if listed and targets and not any(map(settings.get, limits)) else ()
