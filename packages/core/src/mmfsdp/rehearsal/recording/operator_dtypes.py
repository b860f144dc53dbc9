"""Refuses operators whose tensors have different dtypes, as torch's kernels do: on shapes alone, some of them run."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_dtypes"]

_PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::mv", "aten::convolution"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::addmv"), (0, 1, 2)),
    **dict.fromkeys(("aten::index_put", "aten::index_put_"), (0, 2)),
    **dict.fromkeys(("aten::index_copy", "aten::index_copy_", "aten::index_add", "aten::index_add_"), (0, 3)),
}
"""Places of the arguments whose dtypes must be equal."""
_NORMS = {"aten::native_layer_norm": (0, 2), "aten::native_group_norm": (0, 1)}
"""The same, if the input is float32: some kernels take parameters of a wider dtype."""


def check_dtypes(name: str, args: Any) -> None:
    """Raise what a kernel would raise.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.

    Raises:
        RuntimeError: The dtypes differ.
    """
    places = _PRODUCTS.get(name) or (_NORMS.get(name) if name in _NORMS and args[0].dtype == torch.float32 else None)
    if places is None:
        return
    dtypes = {value.dtype for place in places if isinstance(value := args[place], torch.Tensor)}
    if len(dtypes) > 1:
        given = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RuntimeError(f"{name.removeprefix('aten::')}() takes tensors of one dtype, got {given}")
