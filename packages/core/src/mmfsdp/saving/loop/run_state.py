"""Gathers a run's state besides weights and optimizer, and restores it on the same or other ranks."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mmfsdp.basics.text import name_list
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, on_all_ranks
from mmfsdp.errors import ConfigError, FormatError, RunDirectoryError, StateDictError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.loop.random_states import random_state, restore_random_state
from mmfsdp.saving.loop.rank_buffers import buffers_of_ranks, restore_buffers
from mmfsdp.saving.loop.rank_rows import digest_of, own_row, row_box, rows_of_ranks
from mmfsdp.saving.reading.content import restricted_load
from mmfsdp.saving.reading.contents import read_now
from mmfsdp.state.averaged_model import AVERAGES, AveragedModel, check_averages_of, compare_averages
from mmfsdp.state.lazy_tensors import locate
from mmfsdp.state.model import load_model_state_dict, model_state_dict

__all__ = ["RunState", "Stateful"]

_VERSION = 2
_LABELS = {"averaged": "averaged", AVERAGES: "averaged: AveragedModel"}
"""How messages name averages, by their key in a checkpoint."""
_log = logging.getLogger("mmfsdp.saving")


class Stateful(Protocol):
    """An object with state: a scheduler, a scaler, a data loader, an object of your own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain data and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state."""


@dataclass
class RunState:
    """What belongs to a run besides its model and optimizer."""

    model: nn.Module
    """The sharded model. Its weights and the first rank's buffers are saved elsewhere."""
    scope: Scope
    """The ranks of its mesh."""
    optimizer: Optimizer | None
    """The optimizer, whose state is saved elsewhere."""
    averaged: AveragedModel | nn.Module | None
    """Averaged weights: of the model, or a sharded model of their own."""
    shared: Mapping[str, Stateful]
    """Objects whose state is the same on every rank: schedulers, the scaler."""
    own: Mapping[str, Stateful]
    """The user's objects, whose state may differ between ranks."""
    safe_globals: Sequence[Any]
    """Classes that states may hold besides plain data."""
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._mesh = find_sharded_model(self.model).mesh
        if isinstance(self.averaged, AveragedModel):
            check_averages_of(self.averaged, self.model)
        elif self.averaged is not None:
            find_sharded_model(self.averaged)
        for name, item in {**self.shared, **self.own}.items():
            if isinstance(item, AveragedModel):
                raise ConfigError(
                    f"{name!r} is an AveragedModel. Pass it as averaged=, so that ranks save their shards."
                )
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(
                    f"{name!r} is a {type(item).__name__}, which lacks state_dict() or load_state_dict(). Pass an "
                    "object that has both, such as a scheduler or a class of your own."
                )

    def content(self, step: int, *, whole: bool) -> dict[str, Any]:
        """Return what to save beside weights and optimizer state. Collective: every rank.

        Args:
            step: The number of steps that are done.
            whole: Gather averaged weights on the first rank, for a checkpoint of kind ``full``.

        Raises:
            UnsafePickleError: At the first save: some state holds an object that could not be loaded.
        """
        scope = self.scope
        shared = {name: item.state_dict() for name, item in self.shared.items()}
        own = {name: item.state_dict() for name, item in self.own.items()}
        by_rank = {
            name: own.pop(name)
            for name in list(own)
            if not all_equal(scope, digest_of(own[name])) or _is_of_rank(self.own[name])
        }
        if not self._checked:
            on_all_ranks(lambda: _check_loadable({**shared, **own, **by_rank}, self.safe_globals), scope)
            if scope.is_first:
                self._report(by_rank, scope.size)
            self._checked = True

        def rows(data: bytes) -> torch.Tensor:
            return rows_of_ranks(data, self._mesh, scope, whole=whole)

        run = {
            "version": _VERSION,
            "step": step,
            "ranks": scope.size,
            "classes": self._classes(),
            "shared": shared,
            "own": own,
            "by_rank": {name: rows(_saved(state)) for name, state in by_rank.items()},
            "random": rows(random_state(self._mesh.device_type)),
        }
        if (buffers := buffers_of_ranks(self.model, scope, whole=whole)) is not None:
            run["buffers"] = buffers
        if self.averaged is None:
            return {"run": run}
        if isinstance(self.averaged, AveragedModel):
            return {"run": run, AVERAGES: self.averaged.state_dict()}
        return {"run": run, "averaged": model_state_dict(self.averaged, "full" if whole else "sharded")}

    def _classes(self) -> dict[str, str]:
        """Return the classes of the optimizer and the schedulers, whose states mean nothing to others."""
        found = {name: _class_of(item) for name, item in self.shared.items() if name.startswith("scheduler")}
        return found if self.optimizer is None else {"optimizer": _class_of(self.optimizer), **found}

    def _report(self, by_rank: Iterable[str], ranks: int) -> None:
        """Log what could not be resumed exactly."""
        if names := sorted(by_rank):
            _log.warning(
                "Each rank has its own state of %s. The run can only be resumed on %d ranks.", name_list(names), ranks
            )
        for name, item in self.own.items():
            if (sentence := getattr(item, "inexact", None)) is not None:
                _log.warning("%r: %s", name, sentence)

    def examined(self, content: dict[str, Any], step: int) -> dict[str, Any]:
        """Return a checkpoint's content if it fits this run; what all ranks share is read. Not collective.

        Args:
            content: The content, with tensors that are still on disk. Not changed.
            step: How many steps are done, by the name of the checkpoint.

        Raises:
            FormatError: The checkpoint was not written by a `CheckpointManager`.
            RunDirectoryError: It is of another step; it holds the states of other objects, or of other classes; or it
                needs as many ranks as saved it.
            StateDictError: The averaged weights do not fit.
        """
        run = content.get("run")
        if not isinstance(run, Mapping) or run.get("version") != _VERSION:
            raise FormatError(
                "The checkpoint was not saved by a CheckpointManager of this version. Load it with load_checkpoint(), "
                "and give the CheckpointManager a new directory."
            )
        if run["step"] != step:
            raise RunDirectoryError(
                f"By its name the checkpoint has done {step} steps, but it holds step {run['step']}: it was copied or "
                f"renamed. To resume from step {run['step']}, rename it back, or remove it if the original is there."
            )
        stored = {*run["shared"], *run["own"], *run["by_rank"], *(_LABELS[key] for key in _LABELS if key in content)}
        given = {*self.shared, *self.own, *([] if self.averaged is None else [_LABELS[_key(self.averaged)]])}
        if stored != given:
            raise RunDirectoryError(
                f"The checkpoint holds the state of {name_list(sorted(stored)) or 'no objects'}, and this run has "
                f"{name_list(sorted(given)) or 'none'}. Pass the same objects as in the run that saved it."
            )
        own, saved = self._classes(), run.get("classes", {})  # earlier versions did not store them
        if others := [name for name in own if name in saved and own[name] != saved[name]]:
            name = others[0]
            raise RunDirectoryError(
                f"The checkpoint holds the state of {name} {saved[name]}, and this run has {own[name]}, which would "
                f"train on with foreign settings. Pass {saved[name]}; or load the weights alone with "
                "load_checkpoint(path, model), and give the CheckpointManager a new directory."
            )
        if run["by_rank"] and run["ranks"] != self.scope.size:
            raise RunDirectoryError(
                f"Each of the {run['ranks']} ranks that saved the checkpoint had its own state of "
                f"{name_list(sorted(run['by_rank']))}, so it cannot be restored on {self.scope.size} ranks. Resume on "
                f"{run['ranks']} ranks, or let its state_dict() hold what all ranks share, as DataPosition does."
            )
        if self.averaged is not None:
            found = compare_averages(self.averaged, content[_key(self.averaged)])
            if found.missing or found.mismatched:
                raise StateDictError(f"The averaged weights of the checkpoint do not fit the averaged model: {found}.")
        return {**content, "run": {**run, **{name: read_now(run[name]) for name in ("shared", "own")}}}

    def restore(self, rest: Mapping[str, Any]) -> None:
        """Give all objects and generators the state that a checkpoint holds. Collective: every rank.

        Args:
            rest: What `examined` returned. Each rank reads its own row of what differs between ranks.

        Raises:
            CheckpointError: A rank cannot read its part; raised on every rank.
        """
        run, scope = rest["run"], self.scope
        if isinstance(self.averaged, AveragedModel):
            self.averaged.load_state_dict(rest[AVERAGES])
        elif self.averaged is not None:
            load_model_state_dict(self.averaged, rest["averaged"])
        on_as_many = run["ranks"] == scope.size
        buffers = run.get("buffers")
        rows = [*run["by_rank"].values(), run["random"]] if on_as_many else []
        rows += [buffers] if on_as_many and buffers is not None else []
        locate([(tensor, row_box(tensor, scope.rank)) for tensor in rows], scope)

        def own_part() -> None:
            for name, item in {**self.shared, **self.own}.items():
                if name in run["by_rank"]:
                    state = _loaded(own_row(run["by_rank"][name], scope.rank), name, self.safe_globals)
                else:
                    state = run["shared" if name in self.shared else "own"][name]
                item.load_state_dict(state)
            if on_as_many:
                restore_random_state(own_row(run["random"], scope.rank), self._mesh.device_type)
                if buffers is not None:
                    restore_buffers(self.model, own_row(buffers, scope.rank))
            elif scope.is_first:
                if buffers is not None:
                    _log.warning(
                        "Buffers differed between the %d ranks that saved the checkpoint. On %d ranks all begin with "
                        "those of the first; sharding.broadcast_buffers=True keeps them equal.",
                        run["ranks"],
                        scope.size,
                    )
                _log.warning(
                    "The random numbers of each rank continue only on as many ranks as saved them: %d, not %d. They "
                    "keep the states that this program gave them.",
                    run["ranks"],
                    scope.size,
                )

        on_all_ranks(own_part, scope)


def _key(averaged: AveragedModel | nn.Module) -> str:
    """Return the key of averages in a checkpoint."""
    return AVERAGES if isinstance(averaged, AveragedModel) else "averaged"


def _class_of(item: Any) -> str:
    """Return the name of a class with its members' names: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    lists = [value for value in getattr(item, "__dict__", {}).values() if isinstance(value, list | tuple)]
    members = [_class_of(part) for value in lists for part in value if isinstance(part, LRScheduler)]
    return type(item).__qualname__ + (f"({', '.join(members)})" if members else "")


def _is_of_rank(item: Stateful) -> bool:
    """Tell whether the state of an object belongs to one rank, even if it happens to be the same on all.

    Whatever can be iterated over is a source of data, and counts the samples of its own rank unless it says otherwise.
    """
    return hasattr(item, "__iter__") and not getattr(item, "is_elastic", False)


def _check_loadable(states: Mapping[str, Any], safe_globals: Iterable[Any]) -> None:
    for name, state in states.items():
        _loaded(_saved(state), name, safe_globals)


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(data: bytes, name: str, safe_globals: Iterable[Any]) -> Any:
    return restricted_load(io.BytesIO(data), f"The state of {name!r}", safe_globals)
