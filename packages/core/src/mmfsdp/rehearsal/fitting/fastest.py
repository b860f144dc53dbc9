"""`fit()`: the fastest settings with which a step of training fits into the memory of a device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn as nn

from mmfsdp.basics.text import parse_bytes
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MmfsdpError
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.rehearsal.fitting.candidates import Choice, choices_for, plain_settings, with_offload
from mmfsdp.rehearsal.fitting.changes import changes_of, large_outside
from mmfsdp.rehearsal.fitting.dividing import all_micro_batches, samples_of, tokens_of
from mmfsdp.rehearsal.fitting.fit_result import Fit, FitOption
from mmfsdp.rehearsal.fitting.probing import Prober
from mmfsdp.rehearsal.fitting.rates import rates_of
from mmfsdp.rehearsal.fitting.searching import Found, Search, search, search_faster
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.averaged_weights import EmaFn
from mmfsdp.rehearsal.running.optimizers import OptimizerFn
from mmfsdp.rehearsal.running.step import LossFn
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links, links_of

__all__ = ["REFINED", "fit", "refined"]

_MARGIN = 0.03
"""Share of the memory that is left free, beside the uncertainty of the forecast's upper end, which none of the
published runs exceeded (docs/appendix/published_runs.md)."""

REFINED = frozenset(("wrap", "prefetch"))
"""Sections that are varied around single choices only, because every combination would multiply the search."""


def fit(
    model: nn.Module,
    batch: Any,
    *,
    memory: int | str | None = None,
    margin: float | None = None,
    ranks: int = 8,
    config: ShardConfig | Mapping[str, Any] | None = None,
    policy: Any = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    count: int = 3,
    device: str | Device = "h100",
    links: str | Links | None = None,
    tokens: int | None = None,
    price: float | None = None,
    loss: LossFn | None = None,
    optimizer: str | OptimizerFn | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    assume: float | None = None,
    ema: EmaFn | None = None,
    batch_dim: int = 0,
) -> Fit:
    """Search for the settings with which a step fits into memory, and is fastest.

    Settings that the config states stay as they are. The search varies the others: the strategy and the ranks of a
    shard group, large embeddings and heads as units of their own, activation checkpointing, precision, and
    micro-batches, whose gradients are reduced with the last one or with each. It varies parts of blocks as units, and
    prefetching, around the next faster settings, which do not fit, and around the smallest ones if nothing fits; then
    it also tries shards and optimizer state in CPU memory.
    Bounds of memory and time, or rehearsals of copies of the model with fewer layers, decide most combinations; the
    results were rehearsed with the whole model. Not collective; see `rehearse`.

    Args:
        model: The model, on any device; ``meta`` is enough.
        batch: What one rank gets in a micro-batch, as for `rehearse`. Times ``accumulate``, the rank's samples in a
            step, which the search also divides into other micro-batches.
        memory: Memory of the device, as text such as ``'80GiB'`` or in bytes. Default: the memory of ``device``.
        margin: Share of the memory to leave free, from 0 up to 1, for the error of a forecast.
            Default: 0.03.
        ranks: Number of ranks.
        config: The settings that stay as they are.
        policy: A wrapping policy in place of ``config.wrap``.
        choices: For ``sharding``, ``wrap``, ``precision``, ``activation_checkpointing``, ``prefetch`` and
            ``accumulate``: the values to try instead of the usual ones.
        count: How many settings to find.
        device: The device to train on, see `rehearse`: its operators, its time, its memory.
        links: How ranks are connected, see `Rehearsal.time`; default: as the device is.
        tokens: Tokens of ``batch``, for rates. Default: the elements of its largest tensor of integers with two
            dimensions, if there is one; padding counts.
        price: Price of one device for an hour in any currency, for the price of a billion tokens.
        loss: See `rehearse`.
        optimizer: See `rehearse`.
        max_norm: See `rehearse`.
        accumulate: See `rehearse`.
        assume: See `rehearse`.
        ema: See `rehearse`.
        batch_dim: The dimension of the batch's tensors that counts samples: 1 for a batch of shape (tokens, samples).

    Raises:
        RehearsalError: The model failed, or needs the values of tensors.
        ConfigError: A setting, the memory or a choice is wrong, or no combination is possible.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"ranks is a number of ranks, at least 1, got {ranks!r}.")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"count is a number of settings to find, at least 1, got {count!r}.")
    chosen = device_of(device)
    chosen = replace(chosen, links=links_of(links, chosen.links))
    settings = plain_settings(config)
    whole, kept = _memory_of(memory, chosen), _margin_of(margin)
    room = round(whole * (1 - kept))
    if price is not None and not price > 0:
        raise ConfigError(f"price is what a device costs for an hour, more than 0, got {price!r}.", config="price")
    training = TrainingStep(
        batch, loss=loss, optimizer=optimizer, max_norm=max_norm, accumulate=accumulate, assume=assume, ema=ema
    )
    whole_step = replace(training, batch=all_micro_batches(batch, accumulate, batch_dim), accumulate=1)
    tokens = tokens_of(whole_step.batch) if tokens is None else tokens * accumulate
    samples = samples_of(whole_step.batch, batch_dim)
    units = {name: value for name, value in settings.items() if name in ("wrap", "precision")}
    outside = [] if policy is not None else large_outside(make_plan(model, units, 1))
    prober = Prober(model, whole_step, ranks, chosen, policy, batch_dim)
    together = chosen.links.ranks_per_node
    every = [*choices_for(settings, ranks, samples, outside=outside, ranks_per_node=together, choices=choices)]
    sections = REFINED - {*settings, *(choices or ()), *(() if policy is None else ("wrap",))}
    found = search(prober, every, room, count)

    def near(item: Found, missing: int = 0) -> list[Choice]:
        return [*refined(item.choice, item.rehearsal, sections, missing)]

    def offloading(_: Found) -> list[Choice]:
        return [] if "cpu_offload" in settings else [*with_offload(every)]

    if found.faster is not None:
        every += (tried := near(found.faster, found.faster.estimate.nbytes - room))
        search_faster(found, prober, tried, room)
    for wider in (near, offloading, near):
        if found.smallest is not None:  # nothing fits yet
            tried = wider(found.smallest)
            every += tried
            found = _better(found, prober, tried, room, count)

    def option(item: Found) -> FitOption:
        accumulate = item.choice.accumulate
        estimate = item.estimate
        return FitOption(
            item.choice.settings,
            accumulate,
            samples // accumulate,
            estimate.seconds,
            estimate.nbytes,
            item.rehearsal,
            rates_of(estimate.seconds, estimate.useful, samples, tokens, ranks, price),
            item.choice.reduces,
            tuple(_differences(item.choice, other) for other in item.as_good),
        )

    return Fit(
        memory=whole,
        margin=kept,
        ranks=ranks,
        device=chosen,
        options=tuple(sorted(map(option, found.fits), key=lambda item: item.seconds)),
        faster=None if found.faster is None else option(found.faster),
        smallest=None if found.smallest is None else option(found.smallest),
        considered=len({choice.key for choice in every}) - len(found.invalid),
        impossible=len(found.invalid),
        rehearsed=prober.count,
    )


def _margin_of(margin: float | None) -> float:
    if margin is None:
        return _MARGIN
    if not (isinstance(margin, int | float) and 0 <= margin < 1):
        raise ConfigError(f"margin is a share of the memory, from 0 up to 1, got {margin!r}.", config="margin")
    return float(margin)


def _memory_of(memory: int | str | None, device: Device) -> int:
    if memory is not None:
        return parse_bytes(memory)
    if not device.memory:
        raise ConfigError(
            f"How much memory {device.name} has is not known. Give memory, such as '80GiB'.", config="memory"
        )
    return device.memory


def _better(found: Search, prober: Prober, choices: Sequence[Choice], memory: int, count: int) -> Search:
    """Search further choices, because nothing fits, and return what is better."""
    if not choices:
        return found
    try:
        more = search(prober, choices, memory, count)
    except MmfsdpError:  # none of them is possible
        return found
    if more.smallest is None:  # something fits
        more.faster = found.smallest
    elif found.smallest is not None and _needs(more.smallest) >= _needs(found.smallest):
        return found
    more.invalid += found.invalid
    return more


def _needs(found: Found) -> tuple[int, int]:
    """Return the bytes of the device, which come in segments of 2 MiB, and the bytes at the peak, which decide ties."""
    return found.estimate.nbytes, found.estimate.peak.nbytes


def _differences(shown: Choice, other: Choice) -> dict[str, Any]:
    """Return the sections that replace another choice's; None for sections to leave out."""
    names = {**shown.settings, **other.settings}
    changed = {name: other.settings.get(name) for name in names if shown.settings.get(name) != other.settings.get(name)}
    if shown.accumulate != other.accumulate:
        changed["accumulate"] = other.accumulate
    return changed if shown.reduces == other.reduces else {**changed, "reduces": other.reduces}


def refined(choice: Choice, step: Rehearsal, sections: Collection[str], missing: int = 0) -> Iterator[Choice]:
    """Yield choices whose steps hold less of what is gathered at the peak: each change alone, then all together.

    Args:
        choice: The choice.
        step: Its step.
        sections: Sections of the settings that may be changed, of `REFINED`.
        missing: Bytes that a change must concern.
    """
    changes = [
        change
        for change in changes_of(step, choice.settings, 1, wraps="wrap" in sections)
        if change.settings and set(change.settings) <= set(sections)
    ]
    together: dict[str, Any] = {}
    for change in changes:
        together = {**change.settings, **together}  # the first of a section concerns most
        if change.concerns >= missing:
            yield replace(choice, settings={**choice.settings, **change.settings})
    if len(together) > 1 and sum(change.concerns for change in changes) >= missing:
        yield replace(choice, settings={**choice.settings, **together})
