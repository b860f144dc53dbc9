"""Records allocations, collectives and operators of a running step, by watching what torch dispatches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfsdp.rehearsal.fakes.fake import (
    group_of,
    is_accumulating,
    is_fake,
    is_made_in,
    local_of,
    skipped,
    tensors_in,
    without_fakes,
)
from mmfsdp.rehearsal.recording.kernels.foreach import as_shards, on_shards
from mmfsdp.rehearsal.recording.known_results import DEVICE
from mmfsdp.rehearsal.recording.operator_costs import Costs
from mmfsdp.rehearsal.recording.operator_results import Values
from mmfsdp.rehearsal.recording.phases import StepPosition
from mmfsdp.rehearsal.recording.step_records import (
    FUSED,
    REORDERED,
    TO_CPU,
    TO_DEVICE,
    Allocation,
    Collective,
    Operator,
    signature_of,
)
from mmfsdp.runtime.gradients.backward import is_backward

__all__ = ["Recorder"]

_EMBEDDING = torch.ops.aten.embedding.default
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_BUFFERS = ("gathered", "reduce buffer")
_OF_OPTIMIZER = ("optimizer state", "optimizer temporary", "ema")


@dataclass(slots=True)
class _Live:
    """A storage that exists, and the block that it holds now."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    kind: str
    module: str
    begin: int
    offloaded: int | None = None
    """The moment from which it is in CPU memory, if it ever is."""
    is_constant: bool = False
    """Whether it was found with values that nobody has seen being made."""
    stream: str = ""
    waits: bool = False


class Recorder(TorchDispatchMode):
    """Records while it is active, as the innermost context.

    A storage is a block of memory from the operator that returns it until its last tensor is gone, or until it is
    resized. What a kernel allocates and frees inside an operator is not seen.

    Args:
        mode: The context of `fake_tensors` that the step runs in.
        position: Where the step is.
        values: Runs the operators.
        scratch: Returns the scratch bytes that an operator needs, from its name, arguments and result.
        costs: What operators compute, read and write.
        offloads: Bytes of the rank's shards by unit, if they are in CPU memory between uses, with their gradients and
            what the optimizer makes of them. The step that is recorded does not copy, because its device is the CPU.
        whole: Bytes of the units' whole parameters in the dtypes that they compute in, if shards are whole: nothing is
            sent then, and parameters are copied one by one.
        is_fsdp1: Whether FSDP1 trains, which frees memory that other streams use.

    Attributes:
        ended: The allocations that have ended.
        on_cpu: The ended allocations that were in CPU memory.
        collectives: What was sent.
        operators: What was computed and sent.
        phases: Each phase that has begun, with its first moment.
        moment: The current moment.
        is_paused: Whether nothing is recorded now.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        mode: Any,
        position: StepPosition,
        values: Values,
        scratch: Callable[[str, Any, Any], int],
        costs: Costs,
        offloads: Mapping[str, int] | None = None,
        whole: Mapping[str, int] | None = None,
        is_fsdp1: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.scratch, self.costs = mode, scratch, costs
        self.position, self.values, self.offloads = position, values, offloads
        self._whole, self._is_fsdp1 = whole or {}, is_fsdp1
        self.ended: list[Allocation] = []
        self.on_cpu: list[Allocation] = []
        self.collectives: list[Collective] = []
        self.operators: list[Operator] = []
        self.phases: list[tuple[str, int]] = []
        self.moment = 0
        self._live: dict[int, _Live] = {}
        self._counted: dict[Any, tuple[str, int, int, str, tuple[tuple[int, ...], ...]]] = {}
        self.is_paused = False
        self._added: tuple[int, int] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile while this records."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing, because what runs now does not run in training."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def restart(self) -> None:
        """Forget what has happened; what exists now was there before the step."""
        self.ended, self.on_cpu, self.collectives, self.operators, self.phases, self.moment = [], [], [], [], [], 0
        self.costs.calls.clear()
        self._counted.clear()
        for live in self._live.values():
            live.begin = 0
            live.offloaded = None if live.offloaded is None else 0

    def begin(self, phase: str) -> None:
        """Begin a phase of the step."""
        self.position.phase = phase
        self.phases.append((phase, self.moment + 1))

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str, module: str = "") -> None:
        """Say what tensors are for: those that exist before the step, and those that turn out to be of another kind."""
        for tensor in tensors:
            storage = local_of(tensor).untyped_storage()
            known = self._live.get(id(storage))
            if known is None:
                self._add(storage, kind, module)
            else:
                # Even on a single rank, FSDP1 casts gradients on the stream on which it reduces them.
                if kind == "gradient" and (known.kind == "reduce buffer" or self._is_fsdp1):
                    known.stream = known.stream or "reduces"
                known.kind, known.module = kind, module or known.module

    def adopt_new(self, begin: int, kind: str) -> None:
        """Say what everything is for that was allocated after a moment and still exists."""
        for live in self._live.values():
            if live.begin > begin:
                live.kind = kind

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that shards, or their gradients, are in CPU memory from now on, if the plan has them there."""
        for tensor in tensors if self.offloads is not None else ():
            known = self._live.get(id(local_of(tensor).untyped_storage()))
            if known is not None and known.offloaded is None and isinstance(tensor, DTensor):
                if self._whole and known.kind == "gradient":
                    self._copy(self.position.unit, TO_CPU, known.nbytes)
                known.offloaded = self.moment + 1

    def note_new(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note storages that have been made while this was paused."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._live and is_fake(tensor):
                self._add(storage, self.position.kind, self.position.module)

    def note_kernel(self, nbytes: int, outputs: list[torch.Tensor]) -> None:
        """Note an operator that a compiler made of several.

        Args:
            nbytes: The bytes that it reads and writes.
            outputs: Its results.
        """
        self._note_operator(FUSED, 0, nbytes, self.costs.dtype_of(outputs), tuple(map(_shape, outputs[:3])))

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that tensors lie in other memory than the device's."""
        for tensor in tensors:
            if known := self._live.get(id(local_of(tensor).untyped_storage())):
                known.nbytes = 0

    def finish(self) -> tuple[Allocation, ...]:
        """Return all allocations of the device's memory; those that still exist end now."""
        for live in self._live.values():
            if live.is_constant:
                live.begin, live.kind = 0, "buffer"
            if live.nbytes:
                self._note_end(live, None)
        return tuple(self.ended)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size."""
        known = self._live.get(id(storage))
        if known is None:
            if storage.nbytes():
                self._add(storage, self.position.kind, self.position.module)
        elif known.nbytes != storage.nbytes():
            self._end(known, id(storage))
            unit = self.position.unit
            if storage.nbytes() and unit is not None and unit in self._whole and self.position.gathers:
                share = storage.nbytes() / self._whole[unit]
                self._copy(unit, TO_DEVICE, round((self.offloads or {})[unit] * share))
            self.moment += 1
            known.nbytes, known.begin = storage.nbytes(), self.moment
            # Only FSDP resizes, and before torch 2.15 outside of what gathers.
            known.kind, known.module = "gathered", self.position.module
            if self._is_fsdp1:  # the shard is cast first, on a stream of its own; see `_put` for what is gathered
                known.stream, known.waits = "casts", True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and is_fake(args[0]):
            return args[0].device
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):  # of higher order, such as an operator with its random state
            result = func(*args, **kwargs)
            self.note_new(tensors_in((result,)))
            return result
        if _has_shards(types):
            local = on_shards(func, args)
            if local is None:
                return NotImplemented  # its own operators on local tensors follow
            return as_shards(func, args, self.__torch_dispatch__(func, (), local, kwargs))
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "profiler":  # a name for a profile, in which no tensor takes part
            with without_fakes():
                return func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._note(func, args, kwargs)
            if func.namespace == "c10d":
                return skipped(func, args)
        if func is _EMBEDDING and args[1].dtype not in (torch.int64, torch.int32):  # torch 2.9 accepts them on fakes
            raise RuntimeError(f"An embedding takes 'indices' of Long or Int, got {args[1].dtype}.")
        inputs = tensors_in((args, kwargs))
        self._adopt_constants(inputs)
        result, is_real, recipe = self.values.run(func, args, kwargs, inputs)
        outputs = tensors_in((result,))
        made = [value for value in outputs if is_real or is_made_in(self.mode, value)]
        adds = bool(made) and func is torch.ops.aten.add.Tensor and is_accumulating() and _is_whole(args[0])
        if func.namespace not in _NAMESPACES and (made or any(is_made_in(self.mode, value) for value in inputs)):
            counted = None if recipe is None else self._counted.get(recipe)  # the same recipe does the same
            if counted is None:
                counted = self._count(func, args, kwargs, result, inputs, outputs)
                if recipe is not None:
                    self._counted[recipe] = counted
            self._note_operator(*counted)
        for value in made:
            storage = value.untyped_storage()
            if id(storage) not in self._live:
                self._add(storage, self.position.kind, self.position.module)
        if self._is_fsdp1 and func is torch.ops.aten.cat.default and outputs[0].dim() == 1 and is_backward():
            self._join_gradients(inputs, outputs[0])
        self._added = (id(args[0].untyped_storage()), self.moment) if adds else None
        if count := self.scratch(func._schema.name, args, result):
            begin, self.moment = self.moment + 1, self.moment + 2
            self.ended.append(Allocation(count, self.position.kind, self.position.module, begin, self.moment))
            if self.costs.reorders(func):
                self._note_operator(REORDERED, 0, 2 * count, self.costs.dtype_of(inputs), ())
        return result

    def _adopt_constants(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note tensors that modules hold outside of parameters and buffers, such as the scales of quantised weights.

        They have values, because the model's copy keeps them, and still exist when the step ends. Tensors that forward
        makes from numbers have values, too, but are gone by then.
        """
        for tensor in inputs:
            if tensor.dim() and not is_fake(tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._live:
                    self._add(storage, self.position.kind, self.position.module)
                    self._live[id(storage)].is_constant = True

    def _add(self, storage: torch.UntypedStorage, kind: str, module: str) -> None:
        self.moment += 1
        key = id(storage)

        def gone(_: Any) -> None:
            self._end(self._live.pop(key), key)

        self._live[key] = _Live(weakref.ref(storage, gone), storage.nbytes(), kind, module, self.moment)

    def _end(self, live: _Live, key: int) -> None:
        if self._added == (key, self.moment):  # nothing else held it, so on real tensors autograd adds in place
            self._note_end(live, self.moment)
        elif live.nbytes:
            self.moment += 1
            self._note_end(live, self.moment)

    def _note_end(self, live: _Live, end: int | None) -> None:
        held = Allocation(live.nbytes, live.kind, live.module, live.begin, end, live.stream, live.waits)
        moved = live.offloaded
        if self.offloads is not None and live.kind in _OF_OPTIMIZER:
            moved = live.begin
        if moved is None:
            self.ended.append(held)
            return
        if moved > live.begin:
            self.ended.append(replace(held, end=moved))
        self.on_cpu.append(replace(held, begin=max(live.begin, moved)))

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], outputs: list[Any]
    ) -> tuple[str, int, int, str, tuple[tuple[int, ...], ...]]:
        """Return an operator's name, FLOPs, bytes, dtype and shapes, and remember how it is called."""
        flops, nbytes, dtype, shapes = self.costs.of(func, args, kwargs, result, inputs, outputs)
        name = self.costs.name_of(func, inputs)
        if nbytes:
            self.costs.note(signature_of(name, shapes, dtype, nbytes), func, args, kwargs)
        return name, flops, nbytes, dtype, shapes

    def _note_operator(self, name: str, flops: int, nbytes: int, dtype: str, shapes: Any) -> None:
        position = self.position
        module, role = position.module, position.role
        unit = position.unit if role != "compute" else self.costs.unit_of(module, position.phase)
        if self.offloads is not None and position.phase not in ("forward", "backward"):
            role = "host"
        again = position.kind == "recomputed"
        made = Operator(name, flops, nbytes, module, unit, position.phase, self.moment, dtype, role, shapes, again)
        self.operators.append(made)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        name = _spelt(func._schema.name.partition("::")[2])
        if name is None:
            return
        ranks = group_of([*args, *kwargs.values()])
        # An all-gather writes the whole tensor, a reduce-scatter reads it.
        tensors = [tensors_in((part,)) for part in args[:2]]
        sizes = [sum(value.numel() * value.element_size() for value in part) for part in tensors]
        functional = func.namespace != "c10d"
        nbytes = max(sizes) * (len(ranks) if functional and name == "all_gather" else 1)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        unit, phase = self.position.unit, self.position.phase
        if name == "all_gather":
            self._copy(unit, TO_DEVICE, (self.offloads or {}).get(unit or "", 0))
        self.collectives.append(Collective(name, nbytes, len(ranks), stride, unit, phase, self.moment))
        dtype = self.costs.dtype_of(tensors[0] + tensors[1])
        module, role = self.position.module, self.position.role
        self.operators.append(Operator(name, 0, 0, module, unit, phase, self.moment, dtype, role))
        if name == "all_gather" and not functional:
            self.adopt(tensors[0], "gathered")
            if self._is_fsdp1:
                self._put(tensors[0], "gathers")
            else:
                self._put_gathered(unit)
        if name == "reduce_scatter" and not functional:
            # FSDP1 casts and pads gradients on the stream that reduces them, FSDP2 casts on the training stream.
            self._put([*tensors[0], *tensors[1]] if self._is_fsdp1 else tensors[0], "reduces")
        if name == "reduce_scatter" and not self._whole:  # torch 2.9 calls it on one rank, too
            self._copy(unit, TO_CPU, (self.offloads or {}).get(unit or "", 0))

    def _put(self, tensors: Iterable[torch.Tensor], stream: str) -> None:
        """Say on which stream FSDP allocates the buffers of a message, if it has made them for it."""
        for tensor in tensors:
            known = self._live.get(id(tensor.untyped_storage()))
            if known is not None and (known.kind in _BUFFERS or (self._is_fsdp1 and not known.stream)):
                known.stream = stream

    def _put_gathered(self, unit: str | None) -> None:
        """Say on which stream FSDP2 has just cast the shards of a unit, and made the buffer to gather them into."""
        for live in reversed(self._live.values()):
            if live.kind != "gathered" or live.module != unit:
                break
            live.stream = "gathers"

    def _join_gradients(self, parts: Iterable[torch.Tensor], whole: torch.Tensor) -> None:
        """Say what streams use the gradients that become the one of FSDP1's flat parameter.

        FSDP1 splits the flat parameter while it gathers it, so autograd joins the gradients on that stream, and reduces
        the result on another one.
        """
        self._put([whole], "gathers")
        for tensor in (*parts, whole):
            if known := self._live.get(id(tensor.untyped_storage())):
                known.waits = True

    def _copy(self, unit: str | None, name: str, count: int) -> None:
        """Record what a rank copies from CPU memory before it gathers a unit, and to it after it has reduced one."""
        if self.offloads is None or unit is None or unit not in self.offloads:
            return
        if name == TO_DEVICE:  # the copy is gone when it is in the buffer
            begin, self.moment = self.moment + 1, self.moment + 2
            self.ended.append(Allocation(count, "gathered", unit, begin, self.moment, "gathers"))
        phase, role = self.position.phase, self.position.role
        self.operators.append(Operator(name, 0, count, unit, unit, phase, self.moment, "uint8", role))


@functools.cache
def _has_shards(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, DTensor) for kind in types)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage, and repeats nothing."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _spelt(operator: str) -> str | None:
    """Return the plain name of a collective; None for what sends nothing."""
    if operator == "wait_tensor":
        return None
    plain = operator.strip("_").replace("_base", "").replace("_into_tensor", "").replace("_tensor", "")
    plain = plain.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    return plain.removesuffix("_coalesced").removesuffix("_out").removesuffix("_coalesced")
