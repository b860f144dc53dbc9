"""Decides which tensors a conversion casts: not codes, nor the scales of codes that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import OtherCodes, codes_in_units, how_to_restore, parts_of_codes, scales_of
from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.basics.text import compile_pattern, name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.elements import require_numpy
from mmfsdp.errors import ConfigError, closest

__all__ = ["chosen_dtypes"]

_TARGETS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def chosen_dtypes(
    wanted: str | Mapping[str, str], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new dtype of each tensor that changes, and notes of weights that stay codes.

    Args:
        wanted: One dtype for all floating point tensors, or patterns and the dtype of what they match; the first that
            matches counts.
        tensors: The tensors by the names that they will have.

    Raises:
        ConfigError: A dtype is unknown or cannot be cast to, a pattern matches no floating point tensor or only scales
            of codes, a tensor is codes that can be restored, or numpy is not there.
    """
    rules = {"**": wanted} if isinstance(wanted, str) else dict(wanted)
    dtypes = {pattern: canonical_dtype(dtype) for pattern, dtype in rules.items()}
    for dtype in dtypes.values():
        if dtype not in _TARGETS:
            raise ConfigError(f"Tensors cannot be cast to {dtype!r} here. Use one of {', '.join(_TARGETS)}.")
    require_numpy("Casting")
    floating = [name for name, entry in tensors.items() if is_floating_point(entry.dtype)]
    parts = parts_of_codes(tensors)
    chosen: dict[str, str] = {}
    only_scales: tuple[str, str] | None = None
    for pattern, dtype in dtypes.items():
        regex = compile_pattern(pattern, "./")
        matched = [name for name in floating if regex.fullmatch(name)]
        if not matched:
            hint = closest(pattern.replace("*", ""), floating)
            raise ConfigError(f"dtype pattern {pattern!r} matches no floating point tensor.{hint}")
        if all(name in parts for name in matched):
            only_scales = only_scales or (pattern, matched[0])
        for name in matched:
            chosen.setdefault(name, dtype)
    chosen = {name: dtype for name, dtype in chosen.items() if dtype != tensors[name].dtype}
    _refuse_codes(chosen, tensors)
    if only_scales is not None:
        pattern, name = only_scales
        subject = f"{argument('dtype')} finds" if isinstance(wanted, str) else f"dtype pattern {pattern!r} matches"
        raise ConfigError(
            f"{subject} only what belongs to codes, such as {name!r} of weights quantised by "
            f"{parts[name].kind}: a cast would change what they stand for. Leave it out.",
            config="dtype",
        )
    held = {name for name in chosen if name in parts}
    return {name: dtype for name, dtype in chosen.items() if name not in held}, _notes(parts)


def _refuse_codes(chosen: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    """Raise a ``ConfigError`` if codes would be cast, or the scales of codes that can be restored."""
    for name, scale in codes_in_units(tensors).items():
        if name in chosen:
            raise ConfigError(
                f"{name!r} is {tensors[name].dtype} in units of {scale!r}, and a cast would take codes for numbers. "
                + how_to_restore(name, tensors),
                config="dtype",
            )
    for name, scale in scales_of(tensors).items():
        if scale in chosen:
            raise ConfigError(
                f"{scale!r} holds the scales of {name!r}, which is {tensors[name].dtype}: a cast would leave the codes "
                f"and round what they stand for. {how_to_restore(name, tensors)}",
                config="dtype",
            )


def _notes(parts: Mapping[str, OtherCodes]) -> tuple[str, ...]:
    """Return a note for each kind of codes that stay as they are."""
    weights: dict[str, dict[str, None]] = {}
    for codes in parts.values():
        weights.setdefault(codes.kind, {})[codes.weight] = None
    return tuple(
        f"not cast, as they are quantised by {kind}: {name_list([*names], 2)}, with their scales"
        for kind, names in weights.items()
    )
