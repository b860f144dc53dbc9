"""Proves that a model computes the same on several ranks as in one process, checkpoint and resume included."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp import __version__
from mmfsdp.basics.arguments import argument
from mmfsdp.basics.references import resolve_reference
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.parity.comparing.comparison import Comparison
from mmfsdp.parity.comparing.first_difference import compare
from mmfsdp.parity.proving.launched import Launched, Local, are_launched
from mmfsdp.parity.proving.proof import Proof
from mmfsdp.parity.proving.proof_runs import run_reference, run_sharded
from mmfsdp.parity.proving.proof_task import Against, OptimizersFn, Task, is_alone, parts_of
from mmfsdp.rehearsal.running.step import call_with
from mmfsdp.rehearsal.running.training_step import TrainingStep

__all__ = ["Reference", "prove", "prove_beside", "train_reference"]

_SEEDS = (None, 1, 2, 3)


def prove(
    model: str | Callable[[], nn.Module],
    batch: Any,
    *,
    ranks: int | None = None,
    config: ShardConfig | Mapping[str, Any] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    step: Callable[[nn.Module, Any, Any], Any] | None = None,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: str | OptimizersFn | None = None,
    max_norm: float | Sequence[float | None] | None = 1.0,
    accumulate: int = 1,
    steps: int = 3,
    resume_on: int | None = None,
    against: Against = "alone",
    folder: str | Path | None = None,
) -> Proof:
    """Train a model in one process and sharded on several, and compare everything that both compute.

    Both begin with the same weights, get the same samples, and draw the same random numbers for each rank's batch. The
    one process computes the ranks' batches in turn, and averages their gradients. The sharded run saves a checkpoint;
    training goes on from it on another number of ranks. Everything is recorded and compared, see `compare`. Three runs
    of the reference with perturbed inputs are the yardstick. With mixed precision, or an optimizer in the plan, the
    reference is the plan on one rank; otherwise it is the plain model.

    Under torchrun every rank calls this, before it makes a process group, and all get the proof; they compute on their
    accelerators if there are any. Otherwise the ranks are new processes on this machine, which compute on the CPU and
    communicate over gloo; then a script needs ``if __name__ == "__main__":``, as the ranks import it.

    Args:
        model: What makes the model, from a module that other processes can import; or ``'package.module:factory'``. A
            model on ``meta`` gets random weights.
        batch: What one rank gets in a micro-batch, in any structure. Only shapes, dtypes and names count: floating
            point tensors are drawn from a normal distribution, integers below the smallest number of embeddings, and
            masks are one. The first dimension of each tensor counts samples. Or a function that other processes can
            import, which makes what one rank gets from a number: other samples for each.
        ranks: Number of ranks, at least 2: by default 2, under torchrun all that it has started.
        config: The settings to shard with.
        loss: Computes the loss, the mean over samples, of a model and a batch; by default as `mmfsdp.rehearse` does.
            Other processes must be able to import it.
        step: Instead of ``loss``, takes a whole step of a model, a batch and an optimizer: forward, backward, and the
            optimizer's ``step()`` and ``zero_grad()``, each as often as it likes. Gradients are clipped when the
            optimizer steps. With ``accumulate`` it is called once for each micro-batch. Of several optimizers it gets
            a list.
        evaluate: Evaluates a model, in evaluation mode, with a batch; what its modules return is compared. It is called
            after the first step, and after the first one from the checkpoint. By default the model's forward, if there
            is neither ``loss`` nor ``step``.
        optimizer: Name of the optimizer, see `mmfsdp.rehearsal.optimizer_from`, or what makes it of the parameters, or
            a list of several; by default the one that the plan names, or AdamW.
        max_norm: The norm to clip gradients to; None for no clipping. Of several optimizers with ``step``, a list has
            the norm of each.
        accumulate: Number of micro-batches in a step.
        steps: Steps before the checkpoint, and after it.
        resume_on: On how many ranks to go on; by default 1, or 2 if ``ranks`` is more than 2.
        against: The reference: ``"alone"`` is one process, ``"ddp"`` is torch's DDP on as many ranks.
        folder: Where to keep the records, an empty folder or a new one; by default they are removed. Under torchrun on
            several machines, one that they share.

    Raises:
        ConfigError: A number is too small, samples cannot be divided evenly among ``resume_on`` ranks, DDP cannot be
            the reference, or there is no such factory or optimizer.
        ShardStateError: Under torchrun there is a process group already.
        RankError: A rank failed; the message has its traceback. Under torchrun that rank raises its own error.
    """
    found: Launched | Local = Launched() if are_launched() else Local()
    if isinstance(found, Launched) and ranks not in (None, found.world):
        raise ConfigError(
            f"prove() runs on the {found.world} ranks that were started, not on {argument('ranks', ranks)}."
        )
    ranks = found.world if isinstance(found, Launched) else 2 if ranks is None else ranks
    again = (1 if ranks == 2 else 2) if resume_on is None else resume_on
    if ranks < 2 or steps < 1 or accumulate < 1 or again < 1:
        raise ConfigError(
            "prove() needs ranks >= 2, and steps, accumulate and resume_on >= 1, got "
            f"{argument('ranks', ranks)}, {argument('steps', steps)}, {argument('accumulate', accumulate)}, "
            f"{argument('resume_on', again)}."
        )
    if isinstance(found, Launched) and again > ranks:
        raise ConfigError(f"prove() cannot go on with {again} ranks, of {ranks} that were started.", config="resume_on")
    factory = partial(_made, model) if isinstance(model, str) else model
    settings = config if isinstance(config, ShardConfig) else ShardConfig.from_dict(dict(config or {}))
    if settings.parallel is not None:
        raise ConfigError(
            "prove() trains on ranks that shard, and divides nothing along 'tensor' yet. Leave parallel out to prove "
            "all else of the config.",
            config="parallel",
        )
    shapes = batch
    if not callable(batch):
        shapes = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    training = TrainingStep(
        shapes,
        loss=loss,
        step=step,
        evaluate=evaluate or (call_with if loss is None and step is None else None),
        optimizer=optimizer,
        max_norm=None if isinstance(max_norm, Sequence) else max_norm,
        max_norms=tuple(max_norm) if isinstance(max_norm, Sequence) else (),
        accumulate=accumulate,
    )
    task = Task(factory, training, ranks, parts_of(shapes, ranks, again), settings, found.device, against)
    if step is not None and loss is not None:
        raise ConfigError("prove() takes a loss or a whole step, not both.", config="step")
    if isinstance(max_norm, Sequence) and not max_norm:
        raise ConfigError("max_norm is an empty list. Write a norm for each optimizer, or None.", config="max_norm")
    if step is None and isinstance(max_norm, Sequence):
        raise ConfigError("A norm for each optimizer needs step=..., which clips when one steps.", config="max_norm")
    if against not in ("alone", "ddp"):
        raise ConfigError(f"prove() takes against='alone' or 'ddp', got {against!r}.", config="against")
    if against == "ddp" and (why := is_alone(task)):
        raise ConfigError(f"DDP cannot be the reference: the plan has {why}, which it does not know.", config="against")
    with found.folder(folder) as home:
        return prove_beside(found, task, train_reference(found, task, home, 2 * steps), home, steps, again)


@dataclass(frozen=True)
class Reference:
    """The runs in one process, or with DDP."""

    record: Path
    """The record; those with perturbed inputs are beside it."""
    model: str
    """The name of the model."""
    known: tuple[str, ...]
    """What must be known of the runs."""
    ended: tuple[int, ...]
    """After each step, how many steps the record has."""


def train_reference(found: Launched | Local, task: Task, home: Path, steps: int) -> Reference:
    """Train in one process, or with DDP, with and without perturbed inputs. Collective.

    Args:
        found: The processes.
        task: What to train; strategy, recomputation and offload of its plan make no difference.
        home: Where to keep the records.
        steps: Number of steps.
    """
    record = home / "reference"
    jobs = [(task, str(_perturbed(record, seed)), steps, seed) for seed in _SEEDS]
    if task.against == "ddp":
        results = [found.together(run_reference, task.ranks, *job)[0] for job in jobs]
    else:
        results = found.alone(run_reference, jobs, task.ranks)
    name, known, ended = results[0]
    return Reference(record, name, tuple(known), tuple(ended))


def prove_beside(
    found: Launched | Local, task: Task, reference: Reference, home: Path, steps: int, again: int
) -> Proof:
    """Train with the plan, resume on other ranks, and compare both with the reference. Collective.

    Args:
        found: The processes.
        task: What to train.
        reference: The runs in one process, of twice as many steps.
        home: Where to keep records and the checkpoint.
        steps: Steps before the checkpoint, and after it.
        again: On how many ranks to go on.
    """
    trained, resumed, saved = (home / name for name in ("ranks", "resumed", "checkpoint"))
    first = reference.ended[steps - 1]
    found.together(run_sharded, task.ranks, task, str(trained), (0, steps), 0, None, str(saved))
    found.together(run_sharded, again, task, str(resumed), (steps, 2 * steps), first, str(saved), None)
    both = found.decide(lambda: (_compared(reference.record, trained), _compared(reference.record, resumed)))
    versions = {"mmfsdp": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return Proof(
        reference.model,
        task.ranks,
        steps,
        again,
        *both,
        versions,
        reference.known,
        found.device,
        task.against,
        found.rank,
    )


def _perturbed(reference: Path, seed: int | None) -> Path:
    return reference if seed is None else reference.with_name(f"{reference.name}{seed}")


def _compared(reference: Path, other: Path) -> Comparison:
    found = compare(reference, other, perturbed=[_perturbed(reference, seed) for seed in _SEEDS[1:]])
    found.notes = [note for note in found.notes if "of its steps" not in note]  # each has a part of the reference's
    return found


def _made(reference: str) -> nn.Module:
    made = resolve_reference(reference)()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{reference!r} must return an nn.Module, got a {type(made).__name__}.")
    return made
