"""`Rehearsal`: what one rank allocates and sends in a step of training, as a value that prints and becomes JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.basics.text import human_bytes, human_range, parse_bytes
from mmfsdp.errors import ConfigError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.allocator.accounting import held_at, highest, ordered, series, shares
from mmfsdp.rehearsal.allocator.device_memory import beside_allocator, taken_ranges, workspaces_of
from mmfsdp.rehearsal.allocator.retries import Retries, retries_of, retries_text, verdict_text
from mmfsdp.rehearsal.allocator.waiting import released_late
from mmfsdp.rehearsal.allocator.wrapping import wrapped_units
from mmfsdp.rehearsal.fakes.compiling import EAGER_INSTEAD, compiles
from mmfsdp.rehearsal.recording.step_records import Allocation, Collective, Moment, Operator
from mmfsdp.rehearsal.savings import Saving, savings_text
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links, links_of
from mmfsdp.rehearsal.timing.step_time import StepTime, time_of

__all__ = ["Rehearsal"]

_POINTS = 120  # of a timeline


@dataclass(frozen=True)
class Rehearsal:
    """The memory and the communication of one rank in one step, after the optimizer has made its state.

    The step runs from the first micro-batch to ``zero_grad()``. Bytes are those that tensors ask for, without what an
    allocator rounds up or keeps.
    """

    rank: int
    mesh: str
    """The ranks, as text."""
    engine: str
    device_type: str
    """The device whose optimizer kernels were rehearsed."""
    allocations: tuple[Allocation, ...]
    """All allocations in the order in which they end; those that outlive the step come last."""
    collectives: tuple[Collective, ...]
    """All collectives in the order in which they are issued."""
    phases: tuple[tuple[str, int], ...]
    """Each phase (``forward``, ``backward``, ``clipping``, ``optimizer``) with the moment at which it begins, in order;
    forward and backward once for each micro-batch."""
    last: int
    """The last moment."""
    plan: ShardPlan
    """The plan that was applied."""
    operators: tuple[Operator, ...] = ()
    """All operators, collectives included, in the order in which the CPU issues them."""
    on_cpu: tuple[Allocation, ...] = ()
    """Allocations that ``cpu_offload`` keeps in CPU memory; they are not among `allocations`."""
    calls: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """How an operator of each signature is called, to measure it."""
    device: Device | None = None
    """The GPU that was given to `mmfsdp.rehearse`."""
    savings: tuple[Saving, ...] = ()
    """The changes that lower the peak most, if `mmfsdp.rehearsal.advise` looked for them."""

    @property
    def is_eager_instead(self) -> bool:
        """Whether the rehearsal ran units eagerly that are compiled in training."""
        return bool(self.plan.compile or self.plan.compiled_already) and not compiles(self.plan)

    @cached_property
    def peak(self) -> Moment:
        """The moment at which the rank holds most; its ``nbytes`` is the peak."""
        return self.at(highest(self.allocations)[1])

    @cached_property
    def static(self) -> Mapping[str, int]:
        """Bytes by kind that the rank holds before the step, and after it."""
        return self.at(0).by_kind

    @cached_property
    def cpu_bytes(self) -> int:
        """The most bytes of CPU memory that ``cpu_offload`` takes."""
        return highest(self.on_cpu)[0]

    def at(self, moment: int) -> Moment:
        """Return what is held right after a moment."""
        held = list(held_at(self.allocations, moment))
        counts: Counter[str] = Counter()
        for item in held:
            counts[item.kind] += item.nbytes
        latest = max(held, key=lambda item: item.begin, default=None)
        return Moment(
            moment,
            next((name for name, begin in reversed(self.phases) if begin <= moment), "before"),
            "" if latest is None else latest.module,
            counts.total(),
            ordered(counts),
        )

    def reserved(self, *, expandable: bool = False, memory: int | str | None = None) -> tuple[int, int]:
        """Return the least and the most bytes that torch's caching allocator is expected to take from the device.

        The allocations are replayed through a model of the allocator, several times: with small or large workspaces of
        cuBLAS, unless the device is known; with the optimizer's state made before or in the first step; and with FSDP1
        with and without the segments that wrapping left, and what waits for the GPU, see `active`. The interval covers
        these, and that a very large buffer of gradients, an eighth of all, does not find its segment free. What is
        gathered, cast and reduced is on streams of its own, whose freed memory others cannot use. Not included:
        workspaces that the page on operators of the device names, and what `device_bytes` adds.

        Args:
            expandable: As with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
            memory: Memory of the GPU, as for `retries`: on a GPU that is too small the allocator takes less, by giving
                back blocks that it keeps. Default: as on a GPU that is large enough, which tells what to rent.

        Raises:
            ConfigError: The memory is no size.
        """
        size = None if memory is None else parse_bytes(memory)
        low, high = self._taken(expandable, self.allocations, size)[0]
        return low, max(high, self._taken(expandable, self._late, size)[0][1])

    def allocated(self) -> tuple[int, int]:
        """Return the least and the most that ``torch.cuda.max_memory_allocated()`` is expected to show.

        It is `peak` with the workspaces of cuBLAS, which torch takes from its allocator, and with blocks rounded up.
        """
        return self._taken(False, self.allocations)[1]

    def active(self) -> tuple[int, int]:
        """Return the least and the most of ``active_bytes.all.peak`` in ``torch.cuda.memory_stats()``.

        It counts what cannot be handed out again yet. That is more than `allocated` with FSDP1, whose gathered units
        and whole gradients wait until the GPU has used them: none if the CPU is never ahead, and as many as FSDP1 lets
        it be ahead.
        """
        low, high = self.allocated()
        return low, high + highest(self._late)[0] - highest(self.allocations)[0]

    @cached_property
    def _late(self) -> tuple[Allocation, ...]:
        if self.engine != "fsdp1" or self.device_type == "cpu":
            return self.allocations
        return released_late(self.allocations, self.phases)

    def _taken(
        self, expandable: bool, allocations: tuple[Allocation, ...], memory: int | None = None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        key = expandable, allocations is self.allocations, memory
        if key not in self._replayed:
            beside = beside_allocator(self.collectives, self.device)
            self._replayed[key] = taken_ranges(
                allocations,
                self.phases,
                expandable=expandable,
                workspaces=workspaces_of(self.device),
                wrapped=[wrapped_units(self.plan, self.rank, synced=synced) for synced in (False, True)],
                limits=() if memory is None else (memory - beside[1], memory - beside[0]),
            )
        return self._replayed[key]

    @cached_property
    def _replayed(self) -> dict[tuple[bool, bool, int | None], tuple[tuple[int, int], tuple[int, int]]]:
        return {}

    def device_bytes(self, *, expandable: bool = False) -> tuple[int, int]:
        """Return the least and the most bytes that the process takes of a GPU: compare them with what the GPU has.

        To `reserved` come the CUDA context and the buffers of NCCL, one communicator for each group of ranks: constants
        from published measurements, see `mmfsdp.rehearsal.allocator.device_memory`.

        Args:
            expandable: As with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        """
        reserved, beside = self.reserved(expandable=expandable), beside_allocator(self.collectives, self.device)
        return reserved[0] + beside[0], reserved[1] + beside[1]

    def retries(self, memory: int | str | None = None) -> Retries:
        """Return how often torch gives cached memory back in each step because the GPU is full, which makes steps slow.

        The step is replayed as for `reserved`, with streams of their own, after a first step that makes the optimizer's
        state, and with the room that `device_bytes` leaves. With expandable segments torch keeps less in its cache.
        With FSDP1 the range covers what waits for the GPU, see `active`.

        Args:
            memory: Memory of the GPU, as text such as ``'79.1GiB'`` or in bytes, as ``torch.cuda`` reports it.
                Default: the memory of the device that was given to `mmfsdp.rehearse`.

        Raises:
            ConfigError: The memory is not known, or is no size.
        """
        size = self._memory if memory is None else parse_bytes(memory)
        if not size:
            raise ConfigError(
                "How much memory the GPU has is not known. Give memory, such as '79.1GiB'.", config="memory"
            )
        if self.device_type != "cuda" or self.device_bytes()[1] <= size:
            return Retries()
        if size not in self._retried:
            beside, workspaces = beside_allocator(self.collectives, self.device), workspaces_of(self.device)[1]
            self._retried[size] = retries_of(
                self.allocations, self._late, self.phases, size, beside, workspaces, wrapped_units(self.plan, self.rank)
            )
        return self._retried[size]

    def verdict(self, memory: int | str | None = None) -> str:
        """Return what the process takes of a GPU, and whether that fits: ``'1.42 to 2.51 of 79.18 GiB: fits'``.

        Args:
            memory: Memory of the GPU, as for `retries`. Default: the memory of the device that was given to
                `mmfsdp.rehearse`; without one, the verdict is what a GPU must have.

        Raises:
            ConfigError: The memory is no size.
        """
        size = self._memory if memory is None else parse_bytes(memory)
        if self.device_type != "cuda":
            return f"{human_bytes(self.peak.nbytes)} at the peak"
        if not size:
            return f"{human_range(self.device_bytes())} of each GPU"
        return verdict_text(self.device_bytes(), size, self.retries(size))

    def short_of_memory(self) -> str:
        """Return a sentence that says what happens if the device is too small; empty if it is not, or not known."""
        found = self.retries() if self._memory else None
        return retries_text(found, self._memory, self.device_bytes(expandable=True)) if found else ""

    @property
    def _memory(self) -> int:
        """Bytes of the device that was given; 0 if they are not known."""
        return 0 if self.device is None else self.device.memory

    @cached_property
    def _retried(self) -> dict[int, Retries]:
        return {}

    def held(self, moment: int | None = None) -> list[tuple[str, str, int, int]]:
        """Return what is held at a moment, by module and kind, the most first; by default at the peak.

        Each row has the module's FQN, the kind, the bytes, and the number of modules that it stands for: equal layers
        share a row, ``layers.{0..31}``.
        """
        return shares(list(held_at(self.allocations, self.peak.moment if moment is None else moment)))

    def timeline(self, points: int = _POINTS) -> list[tuple[int, dict[str, int]]]:
        """Return bytes by kind over time: the step in equal spans, each at its highest moment.

        Args:
            points: How many spans at most.
        """
        return series(self.allocations, self.last, points)

    def time(self, device: str | Device | None = None, links: str | Links | None = None) -> StepTime:
        """Return how long the step takes on a device, by its roofline, and with FSDP's streams replayed.

        The time of `retries` is not in it.

        Args:
            device: One of `mmfsdp.rehearsal.devices`, or another `Device`. Default: the device that was rehearsed;
                without one ``'h100'``, or ``'cpu'`` for a step on the CPU.
            links: How ranks are connected: one of `mmfsdp.rehearsal.networks`, or other `Links`. Default: as the
                device usually is.

        Raises:
            ConfigError: There is no such device or network.
        """
        known = device_of(device or self.device or ("cpu" if self.device_type == "cpu" else "h100"))
        return time_of(self.operators, self.collectives, known, links_of(links, known.links))

    def sent(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """Return collectives by name, ranks of the group and their stride: how many, and their bytes together."""
        found: dict[tuple[str, int, int], tuple[int, int]] = {}
        for item in self.collectives:
            key = item.name, item.ranks, item.stride
            count, size = found.get(key, (0, 0))
            found[key] = count + 1, size + item.nbytes
        return found

    def describe(self) -> dict[str, Any]:
        """Return plain values only: the peak and what is held at it, the timeline, and every collective."""
        return {
            "rank": self.rank,
            "mesh": self.mesh,
            "engine": self.engine,
            "device_type": self.device_type,
            "device": None if self.device is None else self.device.describe(),
            "peak": self.peak.describe(),
            "reserved": dict(zip(("low", "high"), self.reserved(), strict=True)),
            "device_bytes": dict(zip(("low", "high"), self.device_bytes(), strict=True)),
            "retries": self.retries().describe() if self._memory else None,
            "static": dict(self.static),
            "cpu_bytes": self.cpu_bytes,
            "savings": [saving.describe() for saving in self.savings],
            "held_at_peak": [
                dict(zip(("module", "kind", "nbytes", "modules"), row, strict=True)) for row in self.held()
            ],
            "phases": [{"name": name, "moment": moment} for name, moment in self.phases],
            "timeline": [{"moment": moment, "by_kind": counts} for moment, counts in self.timeline()],
            "collectives": [asdict(item) for item in self.collectives],
        }

    def table(self, *, rows: int = 8, width: int | None = None) -> str:
        """Return the peak by kind, the modules that hold most of it, and what is sent, as aligned text.

        Args:
            rows: How many modules to show.
            width: The longest line in characters; None for no limit.
        """
        return _table(self, rows, width)

    def __str__(self) -> str:
        return self.table()


def _table(step: Rehearsal, rows: int, width: int | None) -> str:
    """Return what `Rehearsal.table` does, of lines of at most ``width`` characters, with ``rows`` modules."""
    peak = step.peak
    where = f"in {peak.phase}" + (f" of {peak.module}" if peak.module else "")
    lines = [f"Peak of rank {step.rank} of {step.mesh}: {human_bytes(peak.nbytes)}, {where}", ""]
    if step.device_type == "cuda" and step._memory:
        lines.insert(0, step.verdict())
    if step.device_type != "cpu":
        lines.insert(-1, f"With what the allocator keeps: {human_range(step.reserved())}")
    if step.device_type == "cuda":
        lines.insert(-1, f"With the CUDA context and NCCL, of the GPU: {human_range(step.device_bytes())}")
    if short := step.short_of_memory():
        lines.insert(-1, short)
    if step.on_cpu:
        lines.insert(-1, f"In CPU memory, because the plan offloads: {human_bytes(step.cpu_bytes)}")
    if step.is_eager_instead:
        lines.insert(-1, EAGER_INSTEAD)
    kinds = [(kind, human_bytes(size), human_bytes(step.static.get(kind, 0))) for kind, size in peak.by_kind.items()]
    columns = [Column("kind"), Column("at the peak", right=True), Column("between steps", right=True)]
    lines += format_table(columns, kinds, width)
    held = step.held()
    shown = [(name or "(model)", kind, human_bytes(size)) for name, kind, size, _ in held[:rows]]
    lines += ["", "Held at the peak, by module:", ""]
    lines += format_table([Column("module", wraps=True), Column("kind"), Column("bytes", right=True)], shown, width)
    if held[rows:]:
        lines.append(f"... and {human_bytes(sum(row[2] for row in held[rows:]))} in {len(held) - rows} more rows")
    if step.savings:
        lines += ["", *savings_text(step.savings)]
    messages = [
        (name, str(ranks), str(count), human_bytes(size)) for (name, ranks, _), (count, size) in step.sent().items()
    ]
    if messages:
        lines += ["", "Sent in the step:", ""]
        titles = [Column("collective"), *(Column(title, right=True) for title in ("ranks", "number", "bytes"))]
        lines += format_table(titles, messages, width)
    return "\n".join(lines)
