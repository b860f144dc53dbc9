"""Runs operators of a rehearsal: for real where the values of their inputs are known, and else on shapes alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mmfsdp.rehearsal.fakes.fake import CANNOT_BE_FAKED, has_constant, is_fake, local_of, tensors_in, without_fakes
from mmfsdp.rehearsal.recording.assuming import answer, finite, scalar
from mmfsdp.rehearsal.recording.device_operators import FUSED_RMS_NORM, FUSED_RMS_NORM_BACKWARD, run_fused_norm
from mmfsdp.rehearsal.recording.kernels.losses import CTC, kept_loss_bytes, run_ctc
from mmfsdp.rehearsal.recording.kernels.onednn_recurrent import LSTM_LAYER, add_workspace
from mmfsdp.rehearsal.recording.known_results import KnownResults, Recipe
from mmfsdp.rehearsal.recording.operator_costs import GROUPED_PRODUCT
from mmfsdp.rehearsal.recording.phases import StepPosition
from mmfsdp.rehearsal.recording.recurrent import RECURRENT, run_recurrent

__all__ = ["Values"]

_MOST = 1 << 22  # elements of a tensor whose values are kept
_LIFTS = ("aten::lift_fresh", "aten::lift_fresh_copy")  # of a new real tensor, as torch.tensor() makes it
_USERS = ("activation", "recomputed")  # kinds of what a model's own code allocates
_AVERAGES = "ema"  # a phase whose code counts its steps
_WITHOUT_MODEL = ("clipping", "optimizer")
_ITEM = "aten::_local_scalar_dense"  # which torch takes long to refuse
_RANDOM = ("rand", "normal", "bernoulli", "multinomial")

_PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::mv", "aten::convolution"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::addmv"), (0, 1, 2)),
    **dict.fromkeys(("aten::index_put", "aten::index_put_"), (0, 2)),
    **dict.fromkeys(("aten::index_copy", "aten::index_copy_", "aten::index_add", "aten::index_add_"), (0, 3)),
}
"""Indices of the arguments whose dtypes must be equal."""
_NORMS = {"aten::native_layer_norm": (0, 2), "aten::native_group_norm": (0, 1)}
"""The same, if the input is float32: some kernels take parameters of a wider dtype."""


class Values:
    """Knows which tensors of a running step have values.

    Parameters and batches have none, nor does what is computed from them. What a model computes from constants
    (anchors, sizes, positions, masks) and from real labels has, so it may ask for them, as in ``if sizes.sum() == 0``.
    It may ask whether values are finite, and finds that they are. Large tensors are given up.

    Args:
        position: Where the step is.
        results: What runs operators on shapes.
        assume: The share of elements that masks of unknown values select; None to raise where they are needed.
        keeps: Whether constants keep their values. FSDP1 makes its buffers in forward, and they must have none.
    """

    def __init__(
        self, position: StepPosition, results: KnownResults, assume: float | None = None, *, keeps: bool = True
    ) -> None:
        self._position, self._assume, self._keeps = position, assume, keeps
        self._results = results
        # Storages of real tensors into which values were written that a rehearsal does not have.
        self._unknown: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> tuple[Any, bool, Recipe | None]:
        """Return an operator's result, whether it ran for real, and the recipe of the result, if there is one.

        ``inputs`` are the tensors among its arguments.
        """
        name: str = func._schema.name
        lifts = name in _LIFTS
        if lifts or not inputs:
            # Before torch 2.12 DTensor makes tensors of its own while averages look at shards.
            is_own = self._position.phase == _AVERAGES and not lifts
            if not self._keeps or is_own or not self._is_users() or _is_random(name):
                result, recipe = self._results.run(func, args, kwargs)
                return result, False, recipe
        elif not all(map(self._is_known, inputs)):
            sure = finite(name, args)
            if sure is not None and args[0].numel() <= _MOST:
                with without_fakes():
                    return torch.full(args[0].shape, sure), True, None
            result, recipe = self._run_on_shapes(name, func, args, kwargs)
            self._forget(func, args, kwargs)
            return result, False, recipe
        if self._is_users() and not func._schema.is_mutable and not lifts:
            try:
                shaped = func(*args, **kwargs)
            except CANNOT_BE_FAKED:  # its values are known
                shaped = None
            if any(value.numel() > _MOST or value.device.type != "cpu" for value in tensors_in((shaped,))):
                return shaped, False, None
        with without_fakes():
            return func(*args, **kwargs), True, None

    def _is_users(self) -> bool:
        return self._position.kind in _USERS or self._position.phase == _AVERAGES

    def _run_on_shapes(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Recipe | None]:
        if name == GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **kwargs), None
        if name in (FUSED_RMS_NORM, FUSED_RMS_NORM_BACKWARD):
            return run_fused_norm(name, args), None
        if name in RECURRENT:
            return run_recurrent(name, args), None
        if name == LSTM_LAYER:
            return add_workspace(args, func(*args, **kwargs)), None
        if name == _ITEM and not has_constant(args[0]):
            result = self._assumed(name, func, args, kwargs)
            if result is not NotImplemented:
                return result, None
        _check_dtypes(name, args)
        if name in CTC and (made := run_ctc(name, args)) is not NotImplemented:
            return made, None
        try:
            result, recipe = self._results.run(func, args, kwargs)
            if nbytes := kept_loss_bytes(name, args, result):
                result.untyped_storage().resize_(nbytes)
            return result, recipe
        except CANNOT_BE_FAKED:
            result = self._assumed(name, func, args, kwargs)
            if result is NotImplemented:
                raise
            return result, None

    def _assumed(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that cannot run without values; ``NotImplemented`` if it has none."""
        if self._assume is not None:
            return answer(func, args, kwargs, self._assume)
        if self._position.phase in _WITHOUT_MODEL and name == _ITEM:
            return scalar(args[0].dtype)  # a norm or a rate, on which no shape depends
        return NotImplemented

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not is_fake(tensor) and id(local_of(tensor).untyped_storage()) not in self._unknown

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note that real tensors into which the operator wrote have unknown values now."""
        if not func._schema.is_mutable:
            return
        for index, declared in enumerate(func._schema.arguments):
            if declared.alias_info is None or not declared.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(declared.name)
            for value in tensors_in((given,)):
                if not is_fake(value):
                    storage = local_of(value).untyped_storage()
                    self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)

        def gone(_: Any) -> None:
            self._unknown.pop(key, None)

        self._unknown[key] = weakref.ref(storage, gone)


def _grouped_product(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Return the product of groups of rows on shapes: torch's own takes bfloat16 only, unlike its kernels."""
    groups = [] if one.dim() != other.dim() else [len(one) if offs is None else len(offs)]
    return torch.empty([*groups, one.shape[-2], other.shape[-1]], dtype=out_dtype or one.dtype)


def _is_random(name: str) -> bool:
    return name.partition("::")[2].startswith(_RANDOM)


def _check_dtypes(name: str, args: Any) -> None:
    """Raise the error that a kernel would raise.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.

    Raises:
        RuntimeError: The dtypes differ.
    """
    indices = _PRODUCTS.get(name) or (_NORMS.get(name) if name in _NORMS and args[0].dtype == torch.float32 else None)
    if indices is None:
        return
    dtypes = {value.dtype for index in indices if isinstance(value := args[index], torch.Tensor)}
    if len(dtypes) > 1:
        given = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RuntimeError(f"{name.removeprefix('aten::')}() takes tensors of one dtype, got {given}")
