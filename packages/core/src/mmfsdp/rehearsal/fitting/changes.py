"""Lists changes of the settings that could lower the peak of a step, by what is held at it. Pure and torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmfsdp.basics.text import name_list
from mmfsdp.config import ShardConfig
from mmfsdp.planning.memory.steps import whole_bytes
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.allocator.accounting import held_at
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["Change", "changes_of", "finer_patterns", "large_outside", "with_units"]

_LARGE = 0.01  # of the parameters: a module that is worth a unit of its own
_FAIR = 0.1  # of a block's parameters: a part of it that is
_LEAST = 0.02  # of the peak: what a change must concern


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to change, and the bytes at the peak that they concern: a saving is hardly larger."""

    what: str
    concerns: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    divides: int = 1
    """Micro-batches that each one becomes."""
    reduces: bool = False
    """Whether gradients are then reduced with each micro-batch, which the loop decides on."""


def changes_of(step: Rehearsal, given: Mapping[str, Any], samples: int, *, wraps: bool) -> list[Change]:
    """Return the changes that concern a fair part of what is held at the peak, those that concern most first.

    Args:
        step: The step.
        given: The user's settings.
        samples: Samples of a micro-batch.
        wraps: Whether the settings choose the units; False if a policy beside them does.
    """
    config, peak = ShardConfig.from_dict(given), step.peak
    held = Counter(peak.by_kind)
    found = [
        *_recomputing(config, held),
        *_sharding(config, step, held),
        *_computing(config, step.plan, held),
        *_prefetching(config, step, held),
        *_reducing(step, held),
        *_offloading(config, step, held),
        *(_wrapping(given, step) if wraps else ()),
    ]
    if samples % 2 == 0:
        found.append(
            Change(f"2 micro-batches of {samples // 2} samples in place of one", _activations(held) / 2, {}, 2)
        )
    return sorted((one for one in found if one.concerns >= _LEAST * peak.nbytes), key=lambda one: -one.concerns)


def large_outside(plan: ShardPlan) -> list[str]:
    """Return the modules that hold much of the model, and are in the root unit."""
    sizes: Counter[str] = Counter()
    for param in plan.root.params:
        sizes[param.fqn.rpartition(".")[0]] += param.numel
    least = _LARGE * plan.param_numel
    return [name for name, numel in sizes.items() if name and numel >= least]


def with_units(given: Mapping[str, Any], patterns: list[str]) -> dict[str, Any]:
    """Return the section ``wrap`` that makes units of further modules."""
    wrap = given.get("wrap", "auto")
    policies = list(wrap["policies"]) if isinstance(wrap, Mapping) and wrap.get("kind") == "any_of" else [wrap]
    if isinstance(policies[-1], Mapping) and policies[-1].get("kind") == "module_name":
        known = policies.pop()["patterns"]
        patterns = [*dict.fromkeys([*([known] if isinstance(known, str) else known), *patterns])]
    return {"kind": "any_of", "policies": [*policies, {"kind": "module_name", "patterns": patterns}]}


def finer_patterns(plan: ShardPlan) -> list[str]:
    """Return patterns of the large children of repeated units: ``layers.*.mlp``."""
    patterns: dict[str, None] = {}
    for name, units in plan.equal_units():
        if len(units) < 2 or units[0].is_root:
            continue
        sizes: Counter[str] = Counter()
        for param in units[0].params:
            child, _, rest = param.fqn.removeprefix(f"{units[0].fqn}.").partition(".")
            if rest:
                sizes[child] += param.numel
        parts = [child for child, numel in sizes.items() if numel >= _FAIR * units[0].numel]
        if len(parts) > 1:
            patterns |= dict.fromkeys(f"{re.sub(r'{.*?}', '*', name)}.{part}" for part in parts)
    return [*patterns]


def _activations(held: Mapping[str, int]) -> int:
    return sum(held[kind] for kind in ("activation", "recomputed", "activation gradient"))


def _recomputing(config: ShardConfig, held: Mapping[str, int]) -> Iterator[Change]:
    now = config.activation_checkpointing
    stated = {} if now is None else now.model_dump(mode="json", exclude_unset=True, exclude={"mode", "n", "save_ops"})
    if now is None:
        what = "all but matrix products and attention recomputed in backward"
        yield Change(what, held["activation"] / 2, {"activation_checkpointing": {"mode": "ops"}})
    if now is None or (now.mode in ("every_n", "ops") and now.modules is None):
        what = "the forward of every unit recomputed in backward"
        yield Change(what, held["activation"], {"activation_checkpointing": {**stated, "mode": "full"}})


def _sharding(config: ShardConfig, step: Rehearsal, held: Mapping[str, int]) -> Iterator[Change]:
    plan, world = step.plan, step.plan.mesh.world_size
    unsharded = 1 - plan.mesh.shard / world
    keeps = any(unit.reshard_after_forward is not True for unit in plan.units if not unit.is_root)
    if world == 1 or not (unsharded or keeps):
        return
    stated = config.sharding.model_dump(
        mode="json", exclude_unset=True, exclude={"strategy", "shard_size", "reshard_after_forward"}
    )
    settings: dict[str, Any] = {"sharding": {**stated, "strategy": "FULL_SHARD"}}
    if config.engine == "replicate":
        settings["engine"] = "auto"
    kept = sum(held[kind] for kind in ("parameter", "optimizer state", "gradient"))
    gathered = held["gathered"] if keeps else 0
    what = f"all of it sharded over {world} ranks" if unsharded else "units freed between forward and backward"
    yield Change(what, kept * unsharded + gathered, settings)


def _offloading(config: ShardConfig, step: Rehearsal, held: Mapping[str, int]) -> Iterator[Change]:
    """Yield that shards move to CPU memory, if they are as small as they can be and still most of what is held."""
    mesh = step.plan.mesh
    if step.engine == "fsdp1" or step.device_type == "cpu" or step.plan.cpu_offload or mesh.shard != mesh.world_size:
        return
    stated = config.cpu_offload.model_dump(mode="json", exclude_unset=True)
    concerned = sum(held[kind] for kind in ("parameter", "optimizer state", "gradient", "ema"))
    if concerned > step.peak.nbytes / 2:
        what = "parameters, gradients and the optimizer in CPU memory"
        yield Change(what, concerned, {"cpu_offload": {**stated, "enabled": True}})


def _computing(config: ShardConfig, plan: ShardPlan, held: Mapping[str, int]) -> Iterator[Change]:
    precision = config.precision
    if not precision.is_mixed and precision.storage_dtype is None and plan.root.precision.param_dtype is None:
        concerned = (_activations(held) + held["gathered"]) / 2
        yield Change("forward and backward in bfloat16", concerned, {"precision": "bf16"})
    elif precision.output_dtype == "float32":
        stated = precision.model_dump(mode="json", exclude_unset=True, exclude={"output_dtype"})
        concerned = (held["activation"] + held["activation gradient"]) / 2
        yield Change("outputs of the model in the dtype that it computes in", concerned, {"precision": stated})


def _prefetching(config: ShardConfig, step: Rehearsal, held: Mapping[str, int]) -> Iterator[Change]:
    if step.engine != "fsdp2" or config.prefetch.backward == "none" or step.peak.phase != "backward":
        return
    units = Counter[str]()
    for item in held_at(step.allocations, step.peak.moment):
        if item.kind == "gathered" and item.module:
            units[item.module] += item.nbytes
    if len(units) > 1:
        stated = config.prefetch.model_dump(mode="json", exclude_unset=True)
        what = "units gathered only when backward needs them, which takes longer"
        yield Change(what, min(units.values()), {"prefetch": {**stated, "backward": "none"}})


def _reducing(step: Rehearsal, held: Mapping[str, int]) -> Iterator[Change]:
    """Yield that each micro-batch reduces its gradients: else they are kept whole until the last one does."""
    micro_batches, shard = sum(name == "forward" for name, _ in step.phases), step.plan.mesh.shard
    if micro_batches > 1 and shard > 1:
        what = f"gradients reduced with each of {micro_batches} micro-batches, which sends them as often"
        yield Change(what, held["gradient"] * (1 - 1 / shard), reduces=True)


def _wrapping(given: Mapping[str, Any], step: Rehearsal) -> Iterator[Change]:
    plan = step.plan
    if plan.mesh.shard == 1:
        return  # nothing is gathered
    if not plan.units[1:]:
        if given.get("wrap", "auto") != "auto":
            yield Change("units chosen by wrap auto", whole_bytes(plan.root), {"wrap": "auto"})
        return
    gathered: Counter[bool] = Counter()
    for item in held_at(step.allocations, step.peak.moment):
        if item.kind in ("gathered", "reduce buffer"):
            gathered[item.module == ""] += item.nbytes
    if outside := large_outside(plan):
        are = "as units of their own" if outside[1:] else "as a unit of its own"
        names = name_list(outside, quoted=False)
        yield Change(f"{names} {are}", gathered[True], {"wrap": with_units(given, outside)})
    if finer := finer_patterns(plan):
        names = name_list(finer, quoted=False)
        yield Change(f"parts of blocks as units: {names}", gathered[False], {"wrap": with_units(given, finer)})
