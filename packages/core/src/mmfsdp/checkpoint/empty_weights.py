"""Finds weights that ZeRO-3 left empty because a model was saved without gathering them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.dtypes import is_floating_point
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.errors import IncompleteCheckpointError

__all__ = ["empty_weights", "refuse_empty_weights"]


def empty_weights(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of weights of shape (0,), which no layer has, in a floating point dtype."""
    empty = [name for name, entry in tensors.items() if entry.shape == (0,) and is_floating_point(entry.dtype)]
    return [name for name in empty if name.rpartition(".")[2] == "weight"]


def refuse_empty_weights(tensors: Mapping[str, TensorEntry], file: Any) -> None:
    """Check that no weight was left empty.

    Args:
        tensors: The weights by name.
        file: Where they lie, for the message.

    Raises:
        IncompleteCheckpointError: One was.
    """
    if names := empty_weights(tensors):
        raise IncompleteCheckpointError(
            f"{name_list(names, 5)} {'has' if len(names) == 1 else 'have'} the shape [0], so the weights are not "
            "here: ZeRO-3 keeps a parameter so on each rank, and the model was saved without gathering it. Save it "
            "again with stage3_gather_16bit_weights_on_model_save, or convert the ZeRO checkpoint itself. What is not "
            f"needed can be left out with {argument('exclude')}.",
            file=str(file),
        )
