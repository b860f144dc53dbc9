"""Tells whether a checkpoint has its weights in the order in which the model registers them.

Nothing says so. Files of ``torch.save`` keep that order unless a script sorted the names; safetensors, and indexes of
several files, do not keep it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from mmfsdp.checkpoint.layout import Layout

__all__ = ["in_model_order"]

_SORTED = ("huggingface", "safetensors", "safetensors_index", "safetensors_ranks")
_ENOUGH = 5  # neighbours in the order of the alphabet, and none against it, are no chance


def in_model_order(layout: Layout, names: Iterable[str]) -> bool:
    """Tell whether a checkpoint has its weights in the order of the model, as far as that can be known.

    Args:
        layout: The checkpoint.
        names: The names of its weights, in order.
    """
    if layout.format == "model":  # made of the model itself
        return True
    of_several_files = layout.format == "torch_index" and len([*layout.files()]) > 1
    return not (layout.format in _SORTED or of_several_files or _were_sorted([*names]))


def _were_sorted(names: Sequence[str]) -> bool:
    """Tell whether somebody sorted the names, or turned them round.

    Layers are numbered upwards in a model, and torch's modules have their weight before their bias.
    """
    place = {name: index for index, name in enumerate(names)}
    biases = [name for name in names if name.endswith("bias") and f"{name[:-4]}weight" in place]
    if biases and all(place[name] < place[f"{name[:-4]}weight"] for name in biases):
        return True
    rising, falls = 0, False
    for one, two in itertools.pairwise(name.split(".") for name in names):
        a, b = next(((a, b) for a, b in zip(one, two, strict=False) if a != b), ("", ""))
        if a.isdecimal() and b.isdecimal():
            if int(a[:18]) > int(b[:18]):
                return True
        else:
            rising, falls = rising + (a < b), falls or a > b
    return rising >= _ENOUGH and not falls
