"""Groups the options that describe a model, or a step of it, into one argument of the commands that take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.modelling import key_values, model_of
from mmfsdp_cli.options.shared import completing, config_file, model_arguments, option, ranks, several
from mmfsdp_cli.printing.help import argument

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.frontends import ReadConfig

__all__ = ["BatchChoice", "ModelChoice", "StepChoice", "takes_batch", "takes_model", "takes_step"]

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


@dataclass(frozen=True)
class ModelChoice:
    """A model, the number of ranks and the settings, as the command line gives them."""

    model: str
    model_arguments: tuple[str, ...]
    ranks: str | None
    config: Path | None
    changes: tuple[str, ...]

    def build(self, command: str) -> tuple[nn.Module, ReadConfig | None]:
        """Return the model on the meta device, and the config that describes it, if there is one.

        Args:
            command: What needs torch, for the error.
        """
        from mmfsdp.basics import require_torch

        require_torch(f"mmfsdp-cli {command}")
        return model_of(self.model, self.model_arguments)

    def wanted(self) -> dict[str, Any]:
        """Return the settings of ``--set`` by their paths."""
        return key_values(self.changes, "--set")


@dataclass(frozen=True)
class BatchChoice:
    """What one rank gets in a step, as the command line gives it: micro-batches, and how many."""

    batch: tuple[str, ...]
    batch_size: str | None
    accumulate: int | None

    def __post_init__(self) -> None:
        if bool(self.batch) == (self.batch_size is not None):
            raise click.UsageError("Give the shapes of a batch with --batch, or for an MMEngine config --batch-size.")


@dataclass(frozen=True)
class StepChoice(BatchChoice):
    """A step to rehearse or to run, as the command line gives it."""

    batch_dim: int | None
    optimizer: str | None
    optimizer_arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_dim is not None and not self.batch:
            raise click.BadParameter("needs --batch, whose samples it counts.", param_hint="--batch-dim")
        if self.optimizer_arguments and self.optimizer is None:
            raise click.BadParameter("needs --optimizer", param_hint="--optimizer-arg")


def takes_model(help_of_ranks: str, *, replicas: bool = True) -> Decorator:
    """Give a command the argument ``chosen``, a `ModelChoice`; ``replicas`` is for `ranks`."""
    return _grouped(
        ModelChoice,
        "chosen",
        (
            argument(
                "model",
                help="package.module:factory, or the path of an MMEngine config, a Hugging Face folder or a "
                "checkpoint.",
            ),
            model_arguments,
            ranks("Model", help_of_ranks, replicas=replicas, axes=replicas),
            config_file("Settings as JSON, TOML or YAML; by default those of an MMEngine config, if MODEL is one."),
            several(
                "--set",
                "changes",
                section="Settings",
                metavar="PATH=VALUE",
                help='One setting: precision=bf16, \'wrap=["Encoder", "Decoder"]\'.',
            ),
        ),
    )


def takes_batch(command: Function) -> Function:
    """Give a command the argument ``step``, a `BatchChoice`."""
    return _grouped(BatchChoice, "step", _BATCH_OPTIONS)(command)


def takes_step(command: Function) -> Function:
    """Give a command the argument ``step``, a `StepChoice`."""
    return _grouped(StepChoice, "step", _STEP_OPTIONS)(command)


def _grouped(record: type, name: str, options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that takes options and passes them on as one record."""
    names = [field.name for field in fields(record)]

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            group = record(**{field: given.pop(field) for field in names})
            return command(**given, **{name: group})

        taking: Function = run
        for take in reversed(options):
            taking = take(taking)
        return taking

    return decorate


def _optimizers() -> Iterable[str]:
    from mmfsdp.planning import OPTIMIZERS

    return OPTIMIZERS


def _samples(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None or value == "own" or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is neither a number of samples nor 'own'.")


_BATCH_OPTIONS = (
    several(
        "--batch",
        section="Step",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="A micro-batch of one rank, samples first: 4x512x1024, or input_ids=1x4096 for each argument. Token ids "
        "are int64 by default, everything else float32.",
    ),
    option(
        "--batch-size",
        section="Step",
        metavar="N|own",
        callback=_samples,
        help="Of an MMEngine config: a micro-batch of N samples, or of its own number, from its data pipeline.",
    ),
    option(
        "--accumulate",
        section="Step",
        metavar="N",
        type=click.IntRange(min=1),
        help="Micro-batches of a step; by default those of a config, else 1.",
    ),
)

_STEP_OPTIONS = (
    *_BATCH_OPTIONS,
    option(
        "--batch-dim",
        section="Step",
        metavar="N",
        type=click.IntRange(min=0),
        help="The dimension of --batch that counts samples, for micro-batches: 1 for TOKENSxSAMPLES; by default 0.",
    ),
    option(
        "--optimizer",
        section="Step",
        metavar="NAME",
        shell_complete=completing(_optimizers),
        help="adamw, sgd-momentum, ..., a class of torch.optim, or package.module:Class. By default that of a config, "
        "else AdamW.",
    ),
    several(
        "--optimizer-arg",
        "optimizer_arguments",
        section="Step",
        metavar="KEY=VALUE",
        help="An argument of the optimizer; may be repeated.",
    ),
)
