"""Matches the weights of several checkpoints by name, and reports every name and shape that does not fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.conversion.settings import Conversion, target_format
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.dequantizing import restore_codes
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import common_prefix, part_tensors
from mmfsdp.errors import ConfigError

__all__ = ["for_weights", "matched_weights", "refuse_settings", "restored_for"]


def for_weights(conversion: Conversion, command: str) -> Conversion:
    """Return the conversion of a result that consists of weights.

    Args:
        conversion: The settings as given.
        command: What computes the result, for messages.

    Raises:
        ConfigError: A setting asks for something other than the weights.
    """
    for name, value in (("keep", conversion.keep not in (None, "model")), ("drop", conversion.drop)):
        if value:
            given = getattr(conversion, name)
            raise ConfigError(f"{command} works on the weights; leave out {argument(name)} {given!r}.", config=name)
    if conversion.use_ema:
        raise ConfigError(f"{command} works on 'state_dict'; convert each checkpoint with {argument('use_ema')} first.")
    return conversion.changed({"keep": "model"})


def restored_for(layouts: Sequence[Layout], target: str | os.PathLike[str], conversion: Conversion) -> Sequence[Layout]:
    """Return checkpoints with their 8-bit codes restored, if the result is not meant to hold codes as they are.

    It is not if ``quantize`` is set, which restores them (``'none'``) or makes new ones, or if a GGUF file is written.

    Args:
        layouts: The checkpoints.
        target: The path to write.
        conversion: The settings of the result.

    Raises:
        ConfigError: ``quantize`` is ``'none'``, and none of them is quantised, or not as is read here.
    """
    if not target_format(checkpoint_path(target, to_write=True), conversion).restores_codes(conversion.quantize):
        return layouts
    return restore_codes(layouts, required=conversion.quantize == "none")


def refuse_settings(conversion: Conversion, names: Sequence[str], why: str) -> None:
    """Raise if one of some settings of a conversion is not the default.

    Args:
        conversion: The settings.
        names: Which ones must not be set.
        why: Why they must not, for the message.

    Raises:
        ConfigError: It names the setting.
    """
    for name in names:
        if value := getattr(conversion, name):
            raise ConfigError(f"{why}: leave out {name!r} {value!r}.", config=name)


def matched_weights(layouts: Sequence[Layout]) -> list[dict[str, TensorEntry]]:
    """Return the weights of each checkpoint by name; the last checkpoint gives names and shapes.

    Raises:
        ConfigError: Names or shapes differ; the message lists them.
        FormatError: A checkpoint has no weights.
    """
    weights = [part_tensors(layout, "model") for layout in layouts]
    for layout, found in zip(layouts[:-1], weights[:-1], strict=True):
        _check_names(layouts[-1], weights[-1], layout, found)
    return weights


def _check_names(one: Layout, ours: Mapping[str, TensorEntry], two: Layout, theirs: Mapping[str, TensorEntry]) -> None:
    problems = []
    for layout, names, others in ((one, ours, theirs), (two, theirs, ours)):
        if lone := [name for name in names if name not in others]:
            problems.append(f"only {str(layout.path)!r} has {name_list(lone, 5)}")
    shapes = [name for name, entry in ours.items() if name in theirs and theirs[name].shape != entry.shape]
    for name in shapes[:5]:
        problems.append(f"{name!r} has shape {list(ours[name].shape)} and {list(theirs[name].shape)}")
    if not problems:
        return
    raise ConfigError(
        f"{str(one.path)!r} and {str(two.path)!r} do not hold the same weights: {'; '.join(problems)}."
        + _hint(one, ours, two, theirs),
        file=str(two.path),
    )


def _hint(one: Layout, ours: Mapping[str, TensorEntry], two: Layout, theirs: Mapping[str, TensorEntry]) -> str:
    for layout, names, others in ((one, ours, theirs), (two, theirs, ours)):
        if prefix := common_prefix(names, others):
            remedy = f"convert it with {argument('strip_prefix')} first."
            return f" Without {prefix!r} in {str(layout.path)!r} they would match: {remedy}"
    return ""
