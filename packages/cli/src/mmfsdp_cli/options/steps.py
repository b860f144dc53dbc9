"""Reads the step that the command line describes, rehearses it, and draws memory over time."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.choices import StepChoice
from mmfsdp_cli.options.modelling import key_values, running_user_code
from mmfsdp_cli.options.plans import known_optimizer, memory_of, mesh_of, planned, print_plan
from mmfsdp_cli.options.shared import option
from mmfsdp_cli.printing.charts import bars
from mmfsdp_cli.printing.console import say

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import ReadConfig, TrainingStep
    from mmfsdp.rehearsal import Rehearsal
    from mmfsdp.torch_style import Translated

__all__ = [
    "advised",
    "assume",
    "batch_of",
    "device",
    "no_data_error",
    "rehearsed",
    "static_part_first",
    "step_of",
    "timeline_chart",
]

_TENSOR = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_OF_TOKENS = ("labels", "attention_mask")
"""Arguments that hold a whole number for each token, beside those whose names end in ``_ids``."""
_SPANS = 24
_KNOWN = "a100, h100, h200, b200, rtx4090, cpu, ..., or a calibrated device; h100@roce-200 also names the network"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from mmfsdp.rehearsal import devices, networks

    name, sign, _ = incomplete.partition("@")
    known = [f"{name}@{network}" for network in networks()] if sign else devices()
    return [text for text in known if text.startswith(incomplete)]


def device(help: str) -> Decorator:
    """Take the device to train on."""
    return option(
        "--device", section="Step", metavar="NAME|FILE", shell_complete=_complete_device, help=f"{help} {_KNOWN}."
    )


assume = option(
    "--assume",
    section="Step",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    help="For models that ask for values of tensors: masks select this share of elements, such as 0.1.",
)


def step_of(model: nn.Module, source: ReadConfig | None, given: StepChoice) -> TrainingStep:
    """Return the step that the command line describes.

    Args:
        model: The model, its parameters on the meta device.
        source: The config that describes it, if there is one.
        given: The options.

    Raises:
        BadParameter: A tensor is malformed, or only some have names; there is no config with a data pipeline.
    """
    with running_user_code():
        from mmfsdp.frontends import TrainingStep
        from mmfsdp.rehearsal import optimizer_from

        if given.batch_size is not None:
            if source is None:
                raise no_data_error(model, given.batch_size)
            step = source.step(model, None if given.batch_size == "own" else int(given.batch_size))
        else:
            batch = batch_of(given.batch, model)
            step = TrainingStep(batch, assumed=_assumed_loss(model, batch))
            if given.optimizer is None and source is not None:
                step = replace(step, optimizer=source.optimizer() or "adamw")
        if given.accumulate is not None:
            step = replace(step, accumulate=given.accumulate)
        if given.optimizer is None:
            return step
        settings = key_values(given.optimizer_arguments, "--optimizer-arg")
        return replace(step, optimizer=optimizer_from(given.optimizer, settings))


def no_data_error(model: nn.Module, size: str) -> click.BadParameter:
    """Return the error of --batch-size for a model that is not a config's."""
    count = size if size.isdecimal() else "4"
    shapes = f": --batch input_ids={count}x4096 --batch labels={count}x4096 for 4,096 tokens"
    return click.BadParameter(
        "is for configs that describe their data. Give the shapes with --batch"
        f"{shapes if 'input_ids' in inspect.signature(model.forward).parameters else ''}.",
        param_hint="--batch-size",
    )


def _assumed_loss(model: nn.Module, batch: Any) -> tuple[str, ...]:
    """Return a sentence if a model that computes its loss from labels gets none."""
    takes = [*inspect.signature(model.forward).parameters]
    given = batch if isinstance(batch, dict) else takes[: len(batch)]
    if "labels" not in takes or "labels" in given:
        return ()
    return (
        "no labels: unless the model returns a loss without them, it is the mean of the output. To add them: --batch "
        "labels=SHAPE",
    )


@contextmanager
def static_part_first(plan: ShardPlan, step: TrainingStep, *, as_json: bool) -> Iterator[None]:
    """Print what needs no rehearsal before the error of one."""
    from mmfsdp.errors import RehearsalError

    try:
        yield
    except RehearsalError:
        if not as_json:
            print_plan(plan)
            named = step.optimizer if step.optimizer or plan.optimizer else "adamw"
            say(f"\n{memory_of(plan, known_optimizer(named))}\n")
        raise


def rehearsed(
    model: nn.Module,
    plan: ShardPlan,
    step: TrainingStep,
    assume: float | None,
    device: str | None,
    *,
    evaluates: bool = False,
    reduces: bool = False,
) -> Rehearsal:
    """Return the rehearsal of a step.

    Args:
        model: The model, its parameters on the meta device.
        plan: Its plan.
        step: The step.
        assume: The share of elements that masks select; None to fail where a model needs their values.
        device: The device to train on; None for a GPU that is not known.
        evaluates: Rehearse its forward alone, without gradients.
        reduces: Reduce gradients with each micro-batch.
    """
    from mmfsdp import rehearse

    with running_user_code():
        given = {"loss": step.loss, "train": False} if evaluates else {**step.arguments(), "reduce_each": reduces}
        return rehearse(plan, model, step.batch, **given, assume=assume, device=device)


def advised(
    model: nn.Module,
    means: Translated,
    ranks: str,
    step: TrainingStep,
    assume: float | None,
    device: str | None,
    batch_dim: int,
) -> Rehearsal:
    """Return the rehearsal of a step with the changes of its settings that lower its peak most.

    Args:
        model: The model, its parameters on the meta device.
        means: The settings, as they were read.
        ranks: Number of ranks, or a mesh, as text.
        step: The step.
        assume: See `rehearsed`.
        device: See `rehearsed`.
        batch_dim: The dimension of the batch's tensors that counts samples.
    """
    from mmfsdp.rehearsal import advise

    if means.check_fn is not None or means.ignored_modules or means.ignored_params:
        # These are of this model, not of its copies.
        return rehearsed(model, planned(model, ranks, means), step, assume, device)
    given = {
        **step.arguments(),
        "mesh": mesh_of(ranks),
        "policy": means.policy,
        "assume": assume,
        "device": device,
        "batch_dim": batch_dim,
    }
    with running_user_code():
        return advise(means.config, model, step.batch, **given)


def timeline_chart(rehearsal: Rehearsal, width: int) -> str:
    """Return bars of the memory over the step, one for each span of it."""
    from mmfsdp.basics import human_bytes

    rows = []
    for moment, counts in rehearsal.timeline(_SPANS):
        phase = rehearsal.at(moment).phase
        largest = max(counts, key=lambda kind: counts[kind], default="")
        rows.append((f"{phase}, mostly {largest}", sum(counts.values())))
    head = f"Memory of rank {rehearsal.rank} over a step, peak {human_bytes(rehearsal.peak.nbytes)}:"
    return "\n".join([head, *bars(rows, width)])


def batch_of(texts: Sequence[str], model: nn.Module) -> Any:
    """Return the batch that texts such as ``4x512`` and ``ids=1x64:int64`` describe, on the meta device.

    Args:
        texts: A tensor each. One without a dtype is float32, or int64 where the model takes tokens.
        model: The model that is given the batch.
    """
    import torch

    from mmfsdp.basics import to_torch
    from mmfsdp.errors import ConfigError

    named: dict[str, torch.Tensor] = {}
    positional: list[torch.Tensor] = []
    takes = list(inspect.signature(model.forward).parameters)
    has_tokens = any(name == "input_ids" for name in (*takes, *(text.partition("=")[0] for text in texts)))
    for text in texts:
        found = _TENSOR.fullmatch(text)
        if found is None:
            raise click.BadParameter(
                f"{text!r} is not a tensor. Write its shape, as in 4x512x1024 or input_ids=1x4096:int64.",
                param_hint="--batch",
            )
        name = found["name"] or next(iter(takes[len(positional) :]), "")
        is_tokens = name.endswith("_ids") or (has_tokens and name.endswith(_OF_TOKENS))
        try:
            dtype = to_torch(found["dtype"] or ("int64" if is_tokens else "float32"))
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--batch") from None
        tensor = torch.empty([int(size) for size in found["shape"].split("x")], dtype=dtype, device="meta")
        if found["name"]:
            named[found["name"]] = tensor
        else:
            positional.append(tensor)
    if named and positional:
        raise click.BadParameter("give a name to all tensors, or to none.", param_hint="--batch")
    return named or tuple(positional)
