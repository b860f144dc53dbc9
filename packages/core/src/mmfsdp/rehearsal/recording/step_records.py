"""The records of a rehearsal: allocations, collectives, operators, and moments of the step. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "CHANNELS_LAST",
    "COPIES",
    "FUSED",
    "KINDS",
    "REORDERED",
    "TO_CPU",
    "TO_DEVICE",
    "Allocation",
    "Collective",
    "Moment",
    "Operator",
    "signature_of",
]

KINDS = (
    "parameter",
    "buffer",
    "optimizer state",
    "ema",
    "input",
    "gradient",
    "gathered",
    "reduce buffer",
    "activation",
    "recomputed",
    "activation gradient",
    "optimizer temporary",
)
"""Purposes of memory. ``parameter`` is the rank's shards and whole parameters; ``gathered`` is other ranks' shards
and copies in the compute dtype; ``recomputed`` is what activation checkpointing computes again; ``activation gradient``
includes temporaries of backward, and ``optimizer temporary`` includes temporaries of clipping and averaging; ``ema`` is
averaged weights."""

COPIES = TO_DEVICE, TO_CPU = ("offload::to_device", "offload::to_cpu")
"""Operators that copy a unit's shards from CPU memory, and its gradients to it, with ``cpu_offload``."""

COPY_IN = "fsdp::all_gather_copy_in"
"""Copies the rank's shards to their offset in a buffer of the whole unit, which is its last tensor."""

FUSED = "inductor::fused"
"""Several operators that a compiler makes one kernel of."""

CHANNELS_LAST = ".channels_last"
"""Suffix of the name of a convolution on an accelerator whose channels come last in memory."""

REORDERED = "cudnn::reordered"
"""The copies with which a convolution reorders channels; its own call issues them."""

_BEFORE_GATHERING = ("aten::_foreach_copy_", COPY_IN)
"""Operators that copy a rank's shards, to the dtype that is sent and into the buffer that is gathered."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block of memory. Moments are numbered: each allocation and each release is one."""

    nbytes: int
    kind: str
    """One of `KINDS`."""
    module: str
    """FQN of the module that ran, in forward or in backward; ``''`` is the whole model, or code outside of it."""
    begin: int
    """The moment from which it is held; 0 if it was there before the step."""
    end: int | None
    """The moment at which it is freed; None if it outlives the step."""
    stream: str = ""
    """The stream of a GPU on which it is allocated: ``gathers``, ``reduces`` or ``casts``, FSDP's own; ``''`` is that
    of training. The caching allocator hands its memory out again on that stream only."""
    waits: bool = False
    """Whether another stream uses it, too, so that its memory is reused only after that use on the GPU."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One message that ranks exchange."""

    name: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` or another one of torch."""
    nbytes: int
    """Bytes of the whole tensor, which a rank receives in an all-gather, and sends in a reduce-scatter."""
    ranks: int
    """Number of ranks in the group."""
    stride: int
    """Distance between neighbouring ranks of the group: 1 for ranks 0, 1, 2; 8 for 0, 8, 16; 0 for one rank."""
    unit: str | None
    """The shard unit's FQN; ``''`` is the root, None if it belongs to no unit."""
    phase: str
    """``forward``, ``backward``, ``clipping`` or ``optimizer``."""
    moment: int
    """The moment at which it is issued."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that the CPU issues; collectives are among them, as often and in the same order."""

    name: str
    """``aten::mm`` and others of torch; a collective has its plain name, such as ``all_gather``."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention; 0 for others."""
    nbytes: int
    """Bytes that are read and written; 0 for views and collectives."""
    module: str
    """FQN of the module that ran, in forward or in backward."""
    unit: str | None
    """FQN of the shard unit that the module belongs to; None if it belongs to none."""
    phase: str
    """``forward``, ``backward``, ``clipping``, ``optimizer``, ``ema`` or ``zero_grad``."""
    moment: int
    """The moment at which it runs; several may run at one."""
    dtype: str
    """The dtype that it computes in: ``bfloat16``; ``tfloat32`` where torch lets an accelerator round ``float32``."""
    role: str = "compute"
    """``gather`` for what collects a unit's parameters, ``reduce`` for what reduces its gradients, ``compute`` for the
    rest; with ``cpu_offload``, ``host`` for what the CPU computes."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its first tensors."""
    is_repeated: bool = False
    """Whether activation checkpointing computes it again, in backward."""

    @property
    def is_of_shards(self) -> bool:
        """Whether it reads and writes the rank's shards only: it takes half as long on twice as many ranks."""
        copies = self.name in COPIES or (self.role == "gather" and self.name in _BEFORE_GATHERING)
        return copies or self.phase not in ("forward", "backward")

    @property
    def signature(self) -> str:
        """Text that operators share which take equally long: ``aten::mm 512x96,96x96 float32 417792``."""
        return signature_of(self.name, self.shapes, self.dtype, self.nbytes)


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of a rank at one moment of the step."""

    moment: int
    phase: str
    module: str
    """The module that allocated last."""
    nbytes: int
    by_kind: Mapping[str, int]
    """Bytes of each kind that is held, in the order of `KINDS`."""

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return asdict(self)


def signature_of(name: str, shapes: Iterable[Iterable[int]], dtype: str, nbytes: int) -> str:
    """Return `Operator.signature`, from an operator's parts."""
    return f"{name} {','.join('x'.join(map(str, shape)) for shape in shapes)} {dtype} {nbytes}"
