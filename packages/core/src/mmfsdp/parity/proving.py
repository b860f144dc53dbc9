"""Proves that a model computes on several ranks what it computes in one process, checkpoint and resume included."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp import __version__
from mmfsdp.basics.references import resolve_reference
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.parity.comparing import compare
from mmfsdp.parity.comparison import Comparison
from mmfsdp.parity.proof import Proof
from mmfsdp.parity.recorder import recording
from mmfsdp.rehearsal.optimizers import make_optimizer
from mmfsdp.rehearsal.realising import real_model
from mmfsdp.rehearsal.step import default_loss
from mmfsdp.runtime.training import clip_grad_norm_, no_sync
from mmfsdp.saving.load import load_checkpoint
from mmfsdp.saving.save import save_checkpoint
from mmfsdp.sharding.apply import shard
from mmfsdp.testing import run_ranks

__all__ = ["prove"]

_SEEDS = (None, 1, 2, 3)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ATTENTION = (nn.MultiheadAttention,)
_FEWEST = 2  # numbers of embeddings to draw integers for if a model has none


def prove(
    model: str | Callable[[], nn.Module],
    batch: Any,
    *,
    ranks: int = 2,
    config: ShardConfig | Mapping[str, Any] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: str = "adamw",
    max_norm: float = 1.0,
    accumulate: int = 1,
    steps: int = 3,
    resume_on: int | None = None,
    folder: str | Path | None = None,
) -> Proof:
    """Train a model in one process and sharded on several, and compare everything that both compute.

    Both begin with the same weights and get the same samples. The sharded run saves a checkpoint; training goes on from
    it on another number of ranks. Everything is recorded and compared, see `compare`. Three runs of the reference with
    perturbed inputs are the yardstick. The ranks are processes on this machine that communicate over gloo and compute
    on the CPU. With mixed precision the reference is the same plan on one rank; otherwise it is the plain model.

    A script that calls this needs ``if __name__ == "__main__":``, as the ranks import it. Not collective.

    Args:
        model: What makes the model, from a module that other processes can import; or ``'package.module:factory'``. A
            model on ``meta`` gets random weights.
        batch: What one rank gets in a micro-batch, in any structure. Only shapes, dtypes and names count: floating
            point tensors are drawn from a normal distribution, integers below the smallest number of embeddings, and
            masks are one. The first dimension of each tensor counts samples.
        ranks: Number of ranks, at least 2.
        config: The settings to shard with.
        loss: Computes the loss, the mean over samples, of a model and a batch; by default as `mmfsdp.rehearse` does.
            Other processes must be able to import it.
        optimizer: Name of the optimizer, see `mmfsdp.rehearsal.optimizer_from`.
        max_norm: The norm to clip gradients to.
        accumulate: Number of micro-batches in a step.
        steps: Steps before the checkpoint, and after it.
        resume_on: On how many ranks to go on; by default 1, or 2 if ``ranks`` is more than 2.
        folder: Where to keep the records, an empty folder or a new one; by default they are removed.

    Raises:
        ConfigError: A number is too small, or there is no such factory or optimizer.
        RankError: A rank failed; the message has its traceback.
    """
    again = (1 if ranks == 2 else 2) if resume_on is None else resume_on
    if ranks < 2 or steps < 1 or accumulate < 1 or again < 1:
        raise ConfigError(
            "prove() needs ranks >= 2, and steps, accumulate and resume_on >= 1, got "
            f"{ranks=}, {steps=}, {accumulate=}, resume_on={again}."
        )
    factory = partial(_made, model) if isinstance(model, str) else model
    settings = config if isinstance(config, ShardConfig) else ShardConfig.from_dict(dict(config or {}))
    shapes = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    task = _Task(factory, shapes, ranks, settings, loss or default_loss, optimizer, max_norm, accumulate)
    with contextlib.ExitStack() as stack:
        home = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        reference, trained, resumed, saved = (home / name for name in ("reference", "ranks", "resumed", "checkpoint"))
        name, dropout = run_ranks(_reference, 1, task, reference, 2 * steps)[0]
        run_ranks(_sharded, ranks, task, trained, 0, steps, None, saved)
        run_ranks(_sharded, again, task, resumed, steps, steps, saved, None)
        versions = {"mmfsdp": __version__, "torch": torch.__version__, "Python": platform.python_version()}
        return Proof(
            name,
            ranks,
            steps,
            again,
            _compared(reference, trained),
            _compared(reference, resumed),
            versions,
            ("with dropout set to 0",) if dropout else (),
        )


def _compared(reference: Path, other: Path) -> Comparison:
    found = compare(reference, other, perturbed=[reference.with_name(f"{reference.name}{seed}") for seed in _SEEDS[1:]])
    found.notes = [note for note in found.notes if "of its steps" not in note]  # each has a part of the reference's
    return found


@dataclass(frozen=True)
class _Task:
    """The computation of each run; it is sent to ranks."""

    factory: Callable[[], nn.Module]
    batch: Any
    ranks: int
    config: ShardConfig
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: str
    max_norm: float
    accumulate: int

    def model(self) -> tuple[nn.Module, bool]:
        """Return the model, and whether dropout was set to 0 in it."""
        torch.manual_seed(0)
        model = real_model(self.factory(), torch.device("cpu")).train()
        found = False
        for module in model.modules():
            name = "p" if isinstance(module, _DROPOUTS) else "dropout" if isinstance(module, _ATTENTION) else ""
            if name and getattr(module, name):
                setattr(module, name, 0.0)
                found = True
        return model, found

    def micro_batch(self, model: nn.Module, step: int, place: int, rank: int, world: int) -> Any:
        """Return a rank's part of the batch that all ranks share, whatever their number."""
        generator = torch.Generator().manual_seed(1000 * step + place)
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        below = min(sizes, default=_FEWEST)

        def draw(shape: torch.Tensor, name: str = "") -> torch.Tensor:
            whole = (shape.shape[0] * self.ranks, *shape.shape[1:])
            if shape.is_floating_point():
                drawn = torch.randn(whole, generator=generator).to(shape.dtype)
            elif "mask" in name or shape.dtype == torch.bool:
                drawn = torch.ones(whole, dtype=shape.dtype)
            else:
                drawn = torch.randint(0, below, whole, generator=generator).to(shape.dtype)
            return drawn.tensor_split(world)[rank]

        if isinstance(self.batch, Mapping):
            return {
                name: tree_map_only(torch.Tensor, partial(draw, name=str(name)), value)
                for name, value in self.batch.items()
            }
        return tree_map_only(torch.Tensor, draw, self.batch)


def _made(reference: str) -> nn.Module:
    made = resolve_reference(reference)()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{reference!r} must return an nn.Module, got a {type(made).__name__}.")
    return made


def _reference(rank: int, task: _Task, folder: Path, steps: int) -> tuple[str, bool]:
    name, dropout = "", False
    for seed in _SEEDS:
        model, dropout = task.model()
        name = type(model).__name__
        is_plain = task.config.precision.param_dtype in (None, "float32")
        module = model if is_plain else shard(model, task.config)
        target = folder if seed is None else folder.with_name(f"{folder.name}{seed}")
        _train(task, module, target, range(steps), (0, 1), perturb=seed, is_sharded=not is_plain)
    return name, dropout


def _sharded(
    rank: int, task: _Task, folder: Path, first: int, steps: int, resume: Path | None, save: Path | None
) -> None:
    world = torch.distributed.get_world_size()
    module = shard(task.model()[0], task.config)
    _train(task, module, folder, range(first, first + steps), (rank, world), resume=resume, save=save)


def _train(
    task: _Task,
    module: nn.Module,
    folder: Path,
    steps: range,
    place: tuple[int, int],
    *,
    perturb: int | None = None,
    is_sharded: bool = True,
    resume: Path | None = None,
    save: Path | None = None,
) -> None:
    optimizer = make_optimizer(task.optimizer, list(module.parameters()), "cpu")
    if resume is not None:
        load_checkpoint(resume, module, optimizer)
    with recording(folder, module, optimizer, perturb=perturb, first_step=steps.start) as record:
        for step in steps:
            for number in range(task.accumulate):
                batch = task.micro_batch(module, step, number, *place)
                hold = is_sharded and number < task.accumulate - 1
                with no_sync(module) if hold else contextlib.nullcontext():
                    loss = task.loss(module, batch) / task.accumulate
                record.loss(loss)
                loss.backward()
            record.before_clipping()
            if is_sharded:
                norm = clip_grad_norm_(module, task.max_norm)
            else:
                norm = _clip(module, task.max_norm)
            record.norm(norm)
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        save_checkpoint(save, module, optimizer)


def _clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip gradients of a plain model by a name that the recording does not watch, as it has been told already."""
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm
