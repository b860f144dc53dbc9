"""A model's own names, shapes, order, ties and memory formats, for checkpoints that do not say them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmfsdp.basics.dtypes import canonical_dtype, itemsize
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef

if TYPE_CHECKING:
    import torch.nn as nn

__all__ = ["layout_of_model"]

_NOWHERE = Path("(the model)")


def layout_of_model(model: nn.Module) -> Layout:
    """Return the parameters of a model as a layout to give as ``reference`` to `open_layout`. Not collective.

    It has no data: each chunk only says which parameter it is, the same for tied names, and how that lies in memory.

    Args:
        model: Not sharded, on any device; ``meta`` is enough.

    Example:
        >>> with parameters_on_meta():
        ...     model = MyModel()
        >>> layout = open_layout("work_dirs/run/epoch_3.pth", reference=layout_of_model(model))
    """
    places: dict[int, int] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        place = places.setdefault(id(param), len(places))
        dtype, shape = canonical_dtype(param.dtype), tuple(param.shape)
        strides = None if param.is_contiguous() else tuple(param.stride())
        whole = Chunk(_NOWHERE, place, param.numel() * itemsize(dtype), (0,) * len(shape), shape, strides)
        tensors[name] = TensorEntry(name, dtype, shape, (whole,))
    return Layout(_NOWHERE, "model", 1, tensors, {name: TensorRef(name) for name in tensors})
