"""Forecasts a rebuilt run: memory from its whole step, time from copies of its model with fewer layers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mmfsdp
from benchmarks.published.hf_models import HfDecoder, HfShape
from benchmarks.published.lit_models import LitDecoder, LitShape, lit_loss
from benchmarks.published.models import Decoder, Shape
from benchmarks.published.qlora_models import QloraDecoder, QloraShape
from benchmarks.published.rebuilding import Rebuilt
from mmfsdp.rehearsal import Collective, Operator, Range, Rehearsal
from mmfsdp.rehearsal.allocator.accounting import highest
from mmfsdp.rehearsal.running.step import call_with
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.links import links_of
from mmfsdp.rehearsal.timing.step_time import StepTime, time_of

__all__ = ["Memory", "Seconds", "memory_of", "retries_of", "seconds_of", "step_of"]

_NODE = 8  # ranks
_FEW = 4, 6  # layers of the copies
_GIB = 1 << 30
_TRAINED = 16  # bytes of a parameter with its gradient and the state of AdamW


@dataclass(frozen=True)
class Memory:
    """What a rank is expected to hold, in GiB."""

    peak: float
    allocated: tuple[float, float]
    active: tuple[float, float]
    reserved: tuple[float, float]
    expandable: tuple[float, float]


@dataclass(frozen=True)
class Seconds:
    """The time that a step is expected to take: usual, least and most."""

    usual: float
    low: float
    high: float
    flops: float


def step_of(run: Rebuilt, layers: int | None = None, *, twice: bool = False) -> Rehearsal:
    """Rehearse a micro-batch of a run, or two that both reduce gradients; with fewer layers if a number is given."""
    shape = run.shape if layers is None else replace(run.shape, layers=layers)
    with torch.device("meta"):
        model, loss = _made(run, shape)
        if run.casts:
            for param in model.parameters():
                param.data = param.data.bfloat16()
        tokens = torch.empty(run.samples, run.rows, dtype=torch.int64)
    is_hybrid = run.config.get("sharding") == "HYBRID_SHARD"
    plan = mmfsdp.plan(model, run.config, (run.ranks // _NODE, _NODE) if is_hybrid else run.ranks)
    if run.keeps_last:
        last = f"blocks.{len(model.blocks) - 1}"
        kept = {"reshard_after_forward": False}
        units = [unit.model_copy(update=kept) if last in unit.fqns else unit for unit in plan.units]
        plan = plan.model_copy(update={"units": tuple(units)})

    # The runs are older than the releases that prefer cuDNN, or pinned flash attention.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        step = mmfsdp.rehearse(
            plan,
            model,
            (tokens, tokens),
            loss=loss,
            optimizer=run.optimizer,
            max_norm=run.max_norm,
            accumulate=2 if run.keeps_gradients or twice else 1,
            reduce_each=twice,
            device=run.device,
        )
    return _reducing_apart(step) if run.reduces_apart else step


def _reducing_apart(step: Rehearsal) -> Rehearsal:
    """Return a step with what it reduces on the stream that reduces."""
    moved = (replace(item, stream="reduces") if item.kind == "reduce buffer" else item for item in step.allocations)
    return replace(step, allocations=tuple(moved))


def _made(run: Rebuilt, shape: Shape | LitShape | HfShape | QloraShape) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return a run's model, and what computes its loss."""
    if isinstance(shape, QloraShape):
        return QloraDecoder(shape), call_with
    if isinstance(shape, HfShape):
        return HfDecoder(shape, run.rows), call_with
    if isinstance(shape, LitShape):
        return LitDecoder(shape, run.rows), lit_loss

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = model(batch[0])
        found = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(0, 1))
        if run.keeps_logits:
            found.logits = logits  # type: ignore[attr-defined]
        return found

    return Decoder(shape, run.rows), loss


def memory_of(run: Rebuilt, cache: Path | None = None) -> Memory:
    """Return the forecast of a run's memory."""

    def make() -> Memory:
        step = step_of(run)
        allocated, active = step.allocated(), step.active()
        if run.keeps_gradients:
            # The longest sample comes first, before there are gradients. How long the others are is not known.
            second = [begin for name, begin in step.phases if name == "forward"][1]
            first = highest(item for item in step.allocations if item.begin < second)[0]
            allocated = allocated[0] - step.peak.nbytes + first, allocated[1]
        memory = device_of(run.device).memory
        reserved, expandable = step.reserved(memory=memory), step.reserved(expandable=True)
        return Memory(
            step.peak.nbytes / _GIB,
            (allocated[0] / _GIB, allocated[1] / _GIB),
            (active[0] / _GIB, active[1] / _GIB),
            (reserved[0] / _GIB, reserved[1] / _GIB),
            (expandable[0] / _GIB, expandable[1] / _GIB),
        )

    found: Memory = _cached(make, ("memory of two" if run.keeps_gradients else "memory", run), cache)
    return found


def retries_of(run: Rebuilt, cache: Path | None = None) -> float:
    """Return how often a micro-batch of a run makes torch give cached memory back at most.

    Only steps are rehearsed whose parameters, gradients and optimizer's state take more than half of the GPU, with
    FSDP1 if the run has no other engine, as the projects that these are of.
    """
    with torch.device("meta"):
        model, _ = _made(run, run.shape)
    if _TRAINED * sum(param.numel() for param in model.parameters()) / run.ranks <= device_of(run.device).memory / 2:
        return 0.0
    twice = run.accumulate > 1

    def make() -> float:
        config = {"engine": "fsdp1", **run.config}
        return step_of(replace(run, config=config), twice=twice).retries().number[1] / (2 if twice else 1)

    found: float = _cached(make, ("retries", run), cache)
    return found


def seconds_of(run: Rebuilt, cache: Path | None = None) -> Seconds:
    """Return the forecast of the time of a run's step, which grows by as much with every layer and micro-batch."""
    device = device_of(run.device)
    if run.attention is not None:
        forward, backward = (Range(share * 0.89, share, share / 0.89) for share in run.attention)
        device = replace(device, attention=forward, attention_backward=backward)
    links = links_of(run.network or None, device.links)
    times = []
    for layers in _FEW:

        def make(layers: int = layers) -> Any:
            step = step_of(run, layers)
            return step.operators, step.collectives

        operators, collectives = _cached(make, (layers, replace(run, accumulate=1, network="", attention=None)), cache)
        whole = _seconds(time_of(operators, collectives, device, links))
        more = whole
        if run.accumulate > 1:
            twice = _seconds(time_of(*_repeated(operators, collectives), device, links))
            more = [one + (run.accumulate - 1) * (two - one) for one, two in zip(whole, twice, strict=True)]
        times.append(more)
    weight = (run.shape.layers - _FEW[0]) / (_FEW[1] - _FEW[0])
    found = [few + weight * (many - few) for few, many in zip(*times, strict=True)]
    return Seconds(*found)


def _seconds(time: StepTime) -> list[float]:
    return [time.seconds, time.low, time.high, float(time.flops)]


def _repeated(
    operators: Sequence[Operator], collectives: Sequence[Collective]
) -> tuple[list[Operator], list[Collective]]:
    """Return a step with a second micro-batch, which reduces its gradients as well."""
    own = [item for item in operators if item.phase in ("forward", "backward")]
    sent = [item for item in collectives if item.phase in ("forward", "backward")]
    return [*own, *operators], [*sent, *collectives]


def _cached(make: Any, key: Any, folder: Path | None) -> Any:
    if folder is None:
        return make()
    path = folder / hashlib.sha256(repr(key).replace(", attention=None", "").encode()).hexdigest()[:24]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())
