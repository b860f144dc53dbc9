"""The private parts of torch that a rehearsal needs. Its world of ranks is in `mmfsdp.rehearsal.fakes.worlds`.

torch offers no public way to run a program without memory and without ranks. This module uses what torch's own memory
tracker uses: fake tensors (``torch._subclasses``), which have shapes and no data, and a replaced
``UntypedStorage.resize_``, which is no operator and by which FSDP frees and allocates gathered parameters. The names
exist in torch 2.9 to 2.15.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import _flat_param
from torch.distributed.tensor import DTensor

from mmfsdp.runtime.gradients.backward import is_backward

__all__ = [
    "CANNOT_BE_FAKED",
    "allocated_by_size",
    "assumed_arrays",
    "backward_number",
    "below_autograd",
    "cloned_by_deepcopy",
    "compiler_of",
    "fake_like",
    "fake_tensors",
    "forward_number",
    "group_of",
    "has_constant",
    "is_accumulating",
    "is_fake",
    "is_made_in",
    "is_traced",
    "layout_of",
    "local_of",
    "plain_params",
    "quiet",
    "shard_like",
    "skipped",
    "tensors_in",
    "unseen_shapes",
    "watched_resizes",
    "without_fakes",
]

_named_group: Any = vars(distributed_c10d)["_resolve_process_group"]

_SHAPES = "_propagate_tensor_meta_non_cached"

CANNOT_BE_FAKED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""The errors that torch raises where an operator needs the values of a tensor."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which every new tensor is fake, on the CPU, and in which real ones may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what torch logs before raising, and warnings that FSDP1 and the recorder's global hooks cause.

    FSDP1 compares addresses, which fake tensors lack, and copies of its views are asked for gradients. What
    ``torch.compile()`` returned warns of global hooks.
    """
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        logger.disabled = before


@contextmanager
def allocated_by_size() -> Iterator[None]:
    """Let FSDP1 tell by size whether a flat parameter is allocated: it asks for the address, and fakes have none."""
    original = vars(_flat_param)["_data_ptr_allocated"]
    vars(_flat_param)["_data_ptr_allocated"] = lambda tensor: tensor.untyped_storage().size() > 0
    try:
        yield
    finally:
        vars(_flat_param)["_data_ptr_allocated"] = original


@contextmanager
def plain_params() -> Iterator[None]:
    """Make plain parameters where modules make some of a class of their own from fake tensors, which torch refuses.

    bitsandbytes' layers of 4 bits do so in forward, with the parameter that FSDP has gathered.
    """
    original = torch.Tensor._make_subclass

    def make(kind: Any, data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_fake(data) and issubclass(kind, torch.nn.Parameter):
            return torch.nn.Parameter(data, *args, **kwargs)
        made: torch.Tensor = original(kind, data, *args, **kwargs)
        return made

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor._make_subclass = staticmethod(original)  # type: ignore[method-assign]


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data."""
    return isinstance(tensor, FakeTensor)


def has_constant(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may have a value after all: a real one, or a fake one that torch knows it of."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, in order: faster than torch's trees."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def is_made_in(mode: Any, tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in this context of `fake_tensors`.

    torch 2.9 computes shapes of DTensors on fake tensors of a context of its own; see `unseen_shapes` for 2.10.
    """
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def layout_of(tensor: torch.Tensor, mode: Any) -> tuple[Any, ...] | None:
    """Return what operators on a fake tensor of a context can depend on; None if there may be more, such as its values.

    Its shape, strides, dtype, offset (in elements), whether gradients are wanted, device, and the bytes of its storage.
    """
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode or tensor.constant is not None:
        return None
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or dtype.is_complex:  # these may be conjugate views
        return None
    nbytes = tensor.untyped_storage().nbytes()
    wanted = tensor.requires_grad
    return tensor.shape, tensor.stride(), dtype, tensor.storage_offset(), wanted, tensor.fake_device, nbytes


def fake_like(layout: tuple[Any, ...], mode: Any, base: torch.Tensor | None = None) -> torch.Tensor:
    """Return a fake tensor of a layout, see `layout_of`.

    Args:
        layout: The layout.
        mode: The context of `fake_tensors`.
        base: The tensor that it is a view of; None for one with a storage of its own.
    """
    shape, stride, dtype, offset, _, device, _ = layout
    # With autograd, a view that a compiled graph makes waits forever (torch 2.13).
    with in_kernel_invocation_manager(mode), below_autograd():
        if base is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = torch.as_strided(base, shape, stride, offset)
    return FakeTensor(mode, made, device)


def without_fakes() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are real."""
    return unset_fake_temporarily()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without an operator; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor that lies as another one does, without an operator."""
    return DTensor(local, like._spec, requires_grad=False)


def group_of(arguments: Any) -> list[int]:
    """Return the ranks of the process group among the arguments of a collective."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, ValueError):  # another object: the operation of a reduction
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
        if isinstance(value, str):
            with suppress(RuntimeError, ValueError, KeyError):  # another text: the operation of a reduction
                return dist.get_process_group_ranks(_named_group(value))
    return []


def skipped(func: Any, args: Any) -> Any:
    """Return the results of a collective without sending: its first argument and a finished work handle."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


@contextmanager
def assumed_arrays(value: Callable[[torch.dtype], Any]) -> Iterator[None]:
    """Give fake tensors as numpy arrays, as SciPy takes them, that are filled with the value of their dtype."""

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        with unset_fake_temporarily():
            return torch.full(tensor.shape, value(tensor.dtype), dtype=tensor.dtype).numpy()

    FakeTensor.numpy = numpy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del FakeTensor.numpy


@contextmanager
def cloned_by_deepcopy() -> Iterator[None]:
    """Let a deep copy clone fake tensors, as it clones parameters; by itself it makes two tensors in one of them."""

    def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) not in memo:
            made = tensor.detach().clone(memory_format=torch.preserve_format)
            is_param = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_param else made
        found: torch.Tensor = memo[id(tensor)]
        return found

    FakeTensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


@contextmanager
def unseen_shapes(unseen: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let DTensor compute the shapes of whole tensors in the context that ``unseen`` returns.

    torch 2.10 and 2.11 run operators on whole tensors for that, in this context of `fake_tensors`.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    original = getattr(propagator, _SHAPES, None)
    if original is None:
        yield
        return

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            return original(*args, **kwargs)

    vars(propagator)[_SHAPES] = propagate
    try:
        yield
    finally:
        del vars(propagator)[_SHAPES]


@contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``resized`` after every resize of a storage."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def compiler_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend for ``torch.compile`` that does what Inductor does before it generates code.

    Operators are taken apart as for Inductor, and its partitioner decides what is kept for backward.

    Args:
        run: Given a graph and examples of its inputs, returns what runs it.
    """
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    made: Callable[..., Any] = aot_autograd(
        fw_compiler=run, decompositions=select_decomp_table, partition_fn=min_cut_rematerialization_partition
    )
    return made


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether an operator on this tensor is being traced into a graph."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FunctionalTensor)


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which operators are not taken apart, and autograd records none of them."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def is_accumulating() -> bool:
    """Return whether the tensors added now may be gradients of a tensor that is used several times.

    Formulas of backward may add, too. Recomputed operators do not count: autograd records them.
    """
    return is_backward() and not torch.is_grad_enabled()


def forward_number() -> int:
    """Return the number that autograd will give the next operator of a forward; it grows."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_number() -> int | None:
    """Return the number of the operator whose backward runs; None if no operator's backward runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
