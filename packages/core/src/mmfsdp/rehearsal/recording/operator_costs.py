"""The work of an operator: floating-point operations, bytes read and written, and dtype, from its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mmfsdp.rehearsal.recording.calls import Call, call_of
from mmfsdp.rehearsal.recording.recurrent import RECURRENT, recurrent_flops
from mmfsdp.rehearsal.recording.step_records import CHANNELS_LAST, COPY_IN

__all__ = ["GROUPED_PRODUCT", "QUANTIZED_PRODUCT", "Costs", "is_view"]

_READS_ROWS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::nll_loss_forward"}
"""Operators that read as much of their first tensor as they write."""

_ADDS_ROWS = {"aten::scatter_add", "aten::index_put", "aten::index_add", "aten::embedding_dense_backward"}

_WRITES_NOTHING = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::detach", "aten::_unsafe_view", "aten::lift_fresh",
}  # fmt: skip
"""Operators that launch no kernel, though their schema names no view."""

GROUPED_PRODUCT = "aten::_grouped_mm"
"""Matrix products of groups of rows, whose FLOPs torch does not count (2.9 to 2.15)."""

QUANTIZED_PRODUCT = "bitsandbytes::gemm_4bit"
"""The product with a weight of 4 bits, as in ``bitsandbytes/_ops.py``: input, codes, and the weight's shape."""

_OF_FSDP = "fsdp::"

_ATTENTION = "aten::_scaled_dot_product_"

_CONVOLUTIONS = _CONVOLUTION, _CONVOLUTION_BACKWARD = "aten::convolution", "aten::convolution_backward"

_LIKE = {  # attention on the CPU, which torch counts from 2.15 on
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


class Costs:
    """Counts the work of a step's operators.

    FLOPs are as in ``torch.utils.flop_counter``; causal attention counts half, because kernels skip what is masked.

    Args:
        units: FQNs of the shard units.
        is_accelerator: Whether the step will run on one, which may round ``float32`` in matrix products.

    Attributes:
        calls: A call of each operator, by signature.
    """

    def __init__(self, units: Iterable[str], *, is_accelerator: bool) -> None:
        self.calls: dict[str, Call] = {}
        self._units = frozenset(units)
        self._owners: dict[str, str] = {}
        self._views: dict[Any, bool] = {}
        self._causal: dict[Any, int | None] = {}
        self._shapes: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {}
        self._rounds = is_accelerator and torch.get_float32_matmul_precision() != "highest"
        self._is_accelerator = is_accelerator
        self._convolves_rounded = is_accelerator and torch.backends.cudnn.allow_tf32

    def unit_of(self, module: str, phase: str) -> str | None:
        """Return the innermost shard unit that a module lies in; None outside of forward and backward."""
        if phase not in ("forward", "backward"):
            return None
        if module not in self._owners:
            name = module
            while name and name not in self._units:
                name = name.rpartition(".")[0]
            self._owners[module] = name
        return self._owners[module]

    def reorders(self, func: Any) -> bool:
        """Return whether an operator's scratch memory holds reordered copies, which take time to make."""
        return self._is_accelerator and func._schema.name in _CONVOLUTIONS

    def name_of(self, func: Any, inputs: Sequence[torch.Tensor]) -> str:
        """Return an operator's name; on an accelerator a convolution's name says if its channels come last."""
        name: str = func._schema.name
        if not self.reorders(func):
            return name
        image = inputs[1 if name == _CONVOLUTION_BACKWARD else 0]
        is_last = image.dim() == 4 and not image.is_contiguous() and image.stride(1) == 1
        return name + CHANNELS_LAST if is_last else name

    def note(self, signature: str, func: Any, args: Any, kwargs: Any) -> None:
        """Remember how an operator is called, unless one of the same signature is known."""
        if signature not in self.calls:
            self.calls[signature] = call_of(func, args, kwargs)

    def dtype_of(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the dtype of the first floating-point tensor, or else of the first one, as text."""
        dtypes = [tensor.dtype for tensor in tensors]
        found = next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else "")
        return str(found).removeprefix("torch.")

    def of(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[int, int, str, tuple[tuple[int, ...], ...]]:
        """Return FLOPs, bytes, dtype and shapes of an operator.

        Args:
            func: The operator, an overload.
            args: Its positional arguments.
            kwargs: Its other arguments.
            result: Its result.
            inputs: The tensors among the arguments.
            outputs: The tensors in the result.
        """
        if self._is_view(func):
            return 0, 0, "", ()
        dtype = self.dtype_of(inputs or outputs)
        formula = flop_registry.get(_LIKE.get(func.overloadpacket, func.overloadpacket))
        counted = _with_equal_heads(args, func._schema.name)
        flops = 0 if formula is None else int(formula(*counted, **kwargs, out_val=result))
        if func._schema.name == GROUPED_PRODUCT:
            flops = _grouped_flops(*args[:2])
        elif func._schema.name == QUANTIZED_PRODUCT:
            flops = 2 * args[0].numel() * args[2][0]
        elif func._schema.name == _CONVOLUTION_BACKWARD:
            flops = _convolution_backward_flops(args)
        elif func._schema.name in RECURRENT:
            flops = recurrent_flops(func._schema.name, args)
        if flops and self._is_causal(func, args, kwargs):
            flops //= 2
        if flops and dtype == "float32":
            rounds = self._convolves_rounded if func._schema.name in _CONVOLUTIONS else self._rounds
            dtype = "tfloat32" if rounds else dtype
        shapes = tuple(tuple(tensor.shape) for tensor in inputs[:3])
        return flops, _moved(func._schema.name, inputs, outputs), dtype, self._shapes.setdefault(shapes, shapes)

    def _is_causal(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func not in self._causal:
            names = [argument.name for argument in func._schema.arguments]
            self._causal[func] = names.index("is_causal") if "is_causal" in names else None
        index = self._causal[func]
        return bool(kwargs.get("is_causal", index is not None and len(args) > index and args[index]))

    def _is_view(self, func: Any) -> bool:
        known = self._views.get(func)
        if known is None:
            known = self._views[func] = is_view(func) or func._schema.name in _WRITES_NOTHING
        return known


def is_view(func: Any) -> bool:
    """Return whether an operator's results only look at the memory of its arguments."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _with_equal_heads(args: Sequence[Any], name: str) -> Sequence[Any]:
    """Return the arguments of an operator, for attention with as many heads of keys and values as of queries.

    Where keys and values have fewer, kernels repeat them; torch 2.9 does not count their FLOPs otherwise.
    """
    if not name.startswith(_ATTENTION):
        return args
    first = 1 if name.endswith("_backward") else 0  # after the gradient of the result
    query, *others = args[first : first + 3]
    if all(part.shape[1] == query.shape[1] for part in others):
        return args
    shapes = [torch.Size((part.shape[0], query.shape[1], *part.shape[2:])) for part in others]
    return [*args[: first + 1], *shapes, *args[first + 3 :]]


def _convolution_backward_flops(args: Sequence[Any]) -> int:
    """Return the FLOPs of the gradients of input and weight; each has as many as forward.

    torch counts the weight's gradient as if there were one group (``conv_backward_flop``, 2.9 to 2.15): for a depthwise
    convolution, too many by a factor of its channels.
    """
    grad, inputs, weight = args[:3]
    is_transposed, wanted = args[7], args[10]
    return int(2 * (inputs if is_transposed else grad).numel() * weight[0].numel() * sum(wanted[:2]))


def _grouped_flops(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the FLOPs of the products of groups of rows with a matrix for each, as experts compute them.

    Groups are told apart along a dimension of the matrices, or have a dimension of their own in three.
    """
    if one.dim() > other.dim():
        return 2 * one.shape[-2] * other.numel()
    return 2 * one.numel() * other.shape[-1]


def _moved(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    plain = name.rstrip("_")
    written = sum(map(_held, outputs))
    if name == COPY_IN:
        return 2 * sum(map(_held, inputs[:-1]))
    if not outputs and name.startswith(_OF_FSDP):  # the results are among its arguments
        return sum(map(_held, inputs))
    if not outputs:  # it writes into its arguments: foreach operators, which read and write the first of them
        return sum(map(_held, inputs)) + (0 if not inputs else _held(inputs[0]))
    if plain in _READS_ROWS:
        return 2 * written + sum(map(_held, inputs[1:]))
    if plain in _ADDS_ROWS and name != plain:
        return 3 * sum(map(_held, inputs[1:]))
    if name in ("aten::zero_", "aten::fill_"):
        return written
    return written + sum(map(_held, inputs))


def _held(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor addresses; an expanded one repeats them."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size
