"""Bounds of memory and time that hold before a step is rehearsed, from its plan and from similar steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.planning.memory.steps import whole_bytes
from mmfsdp.planning.plan_records import MeshSpec, ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.allocator.device_memory import CONTEXT, CUBLAS_LARGE, UNCERTAIN
from mmfsdp.rehearsal.allocator.nccl_memory import NCCL_LIBRARY, communicator_bytes
from mmfsdp.rehearsal.fitting.candidates import Choice
from mmfsdp.rehearsal.fitting.computing import Seconds
from mmfsdp.rehearsal.fitting.probing import Estimate
from mmfsdp.rehearsal.recording.step_records import Collective, Operator
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links, collective_seconds
from mmfsdp.rehearsal.timing.step_time import usual_seconds

__all__ = ["Known", "resharded_seconds", "sending_seconds"]

_UNUSED = 0.8  # of the unused bytes in the allocator; with larger shards a step kept at least 0.84 of them, in 60 cases
_SLOWER = 1.5  # how many times float32 is slower than mixed precision, at least


class Known:
    """Bounds on steps, from other steps that were rehearsed.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._uncertain = 1.0 if device.type == "cpu" else 1 + UNCERTAIN  # part of what a GPU needs at most
        self._derived: dict[tuple[str, MeshSpec, bool], float] = {}
        self._held: dict[str, tuple[int, dict[tuple[str, ...], int]]] = {}
        self._seen: list[tuple[Choice, ShardPlan, Estimate]] = []

    def learn(self, choice: Choice, plan: ShardPlan, estimate: Estimate) -> None:
        """Take in a step that was rehearsed."""
        self._seen.append((choice, plan, estimate))

    def memory(self, choice: Choice, plan: ShardPlan) -> float:
        """Return bytes that a step needs at least.

        Activations of half as many samples are at least half as large. Gradients that earlier micro-batches leave are
        whole, and equally large however many there are. A step that keeps gathered parameters has all of them when its
        last unit begins forward. If two steps gather the same, the one with larger shards needs more: at least the
        bytes that it keeps between steps in addition. The allocator leaves nearly as much unused in both.
        """
        state = min((estimate.state for _, _, estimate in self._seen), default=0.0)
        shards, gathered = self._sizes(choice, plan)
        kept = 0.0 if plan.cpu_offload else shards * (1 + state)
        carried = self._carried(choice, plan)
        least = kept + carried + sum(gathered.values())
        for known, before, estimate in self._seen:
            if known.forward_settings != choice.forward_settings:
                continue
            part = min(known.accumulate / choice.accumulate, 1.0)
            together = sum(gathered.get(unit.fqns, 0) for unit in before.units) if gathered else 0
            in_forward = max(estimate.forward_activations * part, together + estimate.kept_activations * part)
            least = max(least, kept + estimate.activations * part, kept + carried + in_forward)
            if known.loop == choice.loop and _gathers(before) == _gathers(plan):
                more = kept - self._sizes(known, before)[0] * (1 + state)
                taken = (estimate.nbytes - self._beside(before)) / self._uncertain
                unused = max(taken - estimate.peak.nbytes, 0)
                least = max(least, estimate.peak.nbytes + _UNUSED * unused + more if more > 0 else 0.0)
        return least * self._uncertain + self._beside(plan)

    def _sizes(self, choice: Choice, plan: ShardPlan) -> tuple[int, dict[tuple[str, ...], int]]:
        """Return the bytes of a rank's shards, and of what each unit has gathered when forward ends."""
        if choice.plan_key not in self._held:
            self._held[choice.plan_key] = plan.param_bytes(), _gathered(plan)
        return self._held[choice.plan_key]

    def _carried(self, choice: Choice, plan: ShardPlan) -> float:
        """Return the bytes of whole gradients that the last forward finds at least.

        Without this bound the search of ``benchmarks/bench_fit.py --model '6.7 B'`` rehearses 22 steps instead of 16,
        and takes 1.4 times as long for the same result.
        """
        if choice.accumulate == 1 or choice.reduces:
            return 0.0
        alike = [
            (known, estimate)
            for known, before, estimate in self._seen
            if known.kept_settings == choice.kept_settings
            and before.engine == plan.engine
            and (before.mesh.shard == 1) == (plan.mesh.shard == 1)
        ]
        carried = (estimate.carried for known, estimate in alike if known.accumulate > 1 and not known.reduces)
        reduced = min((estimate.reduced for _, estimate in alike), default=0.0)
        return min(carried, default=reduced)

    def _beside(self, plan: ShardPlan) -> int:
        """Return the fewest bytes of a GPU that a process takes beside its step."""
        if self._device.type == "cpu":
            return 0
        groups = sum(ranks > 1 for ranks in (plan.mesh.shard, plan.mesh.replicate))
        sent = NCCL_LIBRARY[1] + groups * communicator_bytes(self._device)[1] if groups else 0
        return CONTEXT[1] + sum(CUBLAS_LARGE) + sent

    def seconds(self, choice: Choice, plan: ShardPlan) -> float:
        """Return the seconds of a step, as they follow from a similar one; or else those that it computes at least."""
        if (derived := self.derived_seconds(choice, plan)) is not None:
            return derived
        checkpointing = choice.settings.get("activation_checkpointing")
        fewer = [(known, estimate) for known, _, estimate in self._seen if known.accumulate <= choice.accumulate]
        alike = [estimate for known, estimate in fewer if known.forward_settings == choice.forward_settings]
        found = [estimate.computing.every for estimate in alike]
        for known, estimate in fewer:
            if known.settings.get("activation_checkpointing") or known.settings.get("precision") == "fp32":
                continue
            computing = estimate.computing
            every = computing.every
            if choice.settings.get("precision") == "fp32":
                every = Seconds(_SLOWER * every.device)  # fewer operators: nothing is cast
            again = [other.computing.repeated for other in alike] or [computing.again(checkpointing)]
            found += [every + seconds for seconds in again]
        copied = self._copied(choice, plan)
        return max(((seconds + copied).on(self._device) for seconds in found), default=0.0)

    def _copied(self, choice: Choice, plan: ShardPlan) -> Seconds:
        """Return how long parameters and gradients are copied at least, by a step with the same units."""
        is_even = choice.reduces or all(unit.reshard_after_forward is True for unit in plan.units if not unit.is_root)
        found = []
        for known, before, estimate in self._seen:
            if known.kept_settings == choice.kept_settings and _gathers(before) == _gathers(plan):
                gathers = choice.accumulate / known.accumulate
                if not is_even:  # without reductions, units may stay gathered from one micro-batch to the next
                    gathers = min(gathers, 1.0)
                if known.reduces or known.accumulate == 1:
                    reductions = (choice.accumulate if choice.reduces else 1) / known.accumulate
                else:  # gradients are added up, too
                    reductions = float(not choice.reduces and choice.accumulate >= known.accumulate)
                found.append(estimate.computing.gathered * gathers + estimate.computing.reduced * reductions)
        return max(found, key=lambda seconds: seconds.on(self._device), default=Seconds())

    def derived_seconds(self, choice: Choice, plan: ShardPlan) -> float | None:
        """Return the seconds of a step, as they follow from one that differs in the shape of its mesh; None without."""
        for known, before, estimate in self._seen:
            if known.forward_key != choice.forward_key or not _can_reshard(before, plan):
                continue
            key = known.key, plan.mesh, plan.units[0].reshard_after_forward is False
            if key not in self._derived:
                more = estimate.seconds
                for weight, step, seconds in estimate.steps:
                    more += weight * (resharded_seconds(step, plan, self._device) - seconds)
                self._derived[key] = more
            return self._derived[key]
        return None


def _gathered(plan: ShardPlan) -> dict[tuple[str, ...], int]:
    """Return the bytes of gathered parameters at the end of forward, by unit, without the root."""
    if plan.mesh.shard == 1 or plan.engine == "replicate":
        return {}
    return {unit.fqns: whole_bytes(unit) for unit in plan.units[:-1] if unit.reshard_after_forward is False}


def _gathers(plan: ShardPlan) -> tuple[object, ...]:
    units = tuple((unit.fqns, unit.reshard_after_forward) for unit in plan.units)
    return plan.engine, plan.forward_prefetch, plan.backward_prefetch, units


def sending_seconds(plan: ShardPlan, choice: Choice, links: Links) -> float:
    """Return the fewest seconds for which a step sends, from what its units gather and reduce.

    Gathering and reducing may overlap.

    Args:
        plan: The plan of the model.
        choice: The micro-batches, and whether gradients are reduced with each or with the last one.
        links: How ranks are connected.
    """
    totals = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for unit in plan.units:
        for times, item in _sent(unit, plan):
            repeats = choice.accumulate if item.name == "all_gather" or choice.reduces else 1
            totals[item.name] += repeats * times * collective_seconds(item, links, links.reached.usual)
    return max(totals.values())


def _sent(unit: ShardUnit, plan: ShardPlan) -> Iterator[tuple[int, Collective]]:
    shard, replicate = plan.mesh.shard, plan.mesh.replicate
    compute, reduce = unit.precision.param_dtype, unit.precision.reduce_dtype
    gathered = whole_bytes(unit)
    trained = (param for param in unit.params if param.requires_grad)
    reduced = sum(param.numel * itemsize(reduce or compute or param.dtype) for param in trained)
    if shard == 1:
        yield 1, Collective("all_reduce", reduced, replicate, 1, unit.fqn, "backward", 0)
        return
    reshards = unit.reshard_after_forward is not False and not unit.is_root
    yield 1 + reshards, Collective("all_gather", gathered, shard, 1, unit.fqn, "forward", 0)
    yield 1, Collective("reduce_scatter", reduced, shard, 1, unit.fqn, "backward", 0)
    if replicate > 1:
        yield 1, Collective("all_reduce", reduced // shard, replicate, shard, unit.fqn, "backward", 0)


def _can_reshard(known: ShardPlan, wanted: ShardPlan) -> bool:
    """Return whether the time with one plan follows from a step with another.

    What a unit gathers again in backward can be left out, but not made up.
    """
    if {known.engine, wanted.engine} != {"fsdp2"} or known.mesh.shard == 1 or wanted.mesh.shard == 1:
        return False
    return _gathers_again(known) or not _gathers_again(wanted)


def resharded_seconds(step: Rehearsal, wanted: ShardPlan, device: Device) -> float:
    """Return the seconds of a step in which the ranks are arranged as another plan says.

    Messages go to other ranks, and gradients are averaged over replicas if there are any. Shards have another size
    where they are copied to be gathered, in clipping and in the optimizer. All else stays.

    Args:
        step: A step of a plan from which the step of ``wanted`` follows; see `_can_reshard`.
        wanted: The plan, for the same model or one with more layers.
        device: The device.
    """
    pairs = [*_rewritten(step, wanted)]
    sent = [message for _, message in pairs if message is not None]
    return usual_seconds([operator for operator, _ in pairs], sent, device)


def _rewritten(step: Rehearsal, wanted: ShardPlan) -> Iterator[tuple[Operator, Collective | None]]:
    """Yield operators, each with its collective if it is one."""
    sent = iter(step.collectives)
    shard, replicate = wanted.mesh.shard, wanted.mesh.replicate
    ratio = step.plan.mesh.shard / shard
    drops = _gathers_again(step.plan) and not _gathers_again(wanted)
    for item in step.operators:
        message = next(sent) if "::" not in item.name else None
        if drops and item.role == "gather" and item.phase == "backward":
            continue
        if message is None:
            yield replace(item, nbytes=round(item.nbytes * ratio)) if item.is_of_shards else item, None
        elif message.unit is None:
            yield from ((item, changed) for changed in _outside_of_units(item, message, step.plan.mesh, wanted.mesh))
        elif message.name in ("all_gather", "reduce_scatter"):
            yield item, replace(message, ranks=shard, stride=1)
            if message.name == "reduce_scatter" and replicate > 1:
                average = replace(message, name="all_reduce", nbytes=message.nbytes // shard, ranks=replicate)
                yield replace(item, name="all_reduce"), replace(average, stride=shard)


def _outside_of_units(item: Operator, message: Collective, known: MeshSpec, wanted: MeshSpec) -> Iterator[Collective]:
    """Yield what is sent in place of a message that belongs to no unit.

    Clipping adds up the norms of shards. When backward ends, ranks tell each other along every dimension of the mesh
    which gradients they have. What modules send goes where it went.
    """
    over_shards = replace(message, ranks=wanted.shard, stride=1)
    if item.phase == "clipping":
        yield over_shards
    elif item.phase != "backward" or item.module:
        yield message
    elif (message.ranks, message.stride) == (known.shard, 1):
        if wanted.replicate > 1:
            yield replace(message, ranks=wanted.replicate, stride=wanted.shard)
        yield over_shards


def _gathers_again(plan: ShardPlan) -> bool:
    return any(unit.reshard_after_forward is not False for unit in plan.units if not unit.is_root)
