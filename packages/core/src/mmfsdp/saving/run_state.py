"""Gathers what a run is made of besides weights and optimizer state, and restores it on the same or other ranks."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn as nn

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, gather_to_first, on_all_ranks
from mmfsdp.errors import ConfigError, FormatError, RunDirectoryError
from mmfsdp.saving.content import restricted_load
from mmfsdp.saving.random_states import pack_random_states, random_state, restore_random_state
from mmfsdp.state.model import load_model_state_dict, model_state_dict

__all__ = ["RunState", "Stateful"]

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

    shared: Mapping[str, Stateful]
    """Objects whose state is the same on every rank: schedulers, the scaler."""
    own: Mapping[str, Stateful]
    """The user's objects, whose state may differ between ranks."""
    averaged: nn.Module | None
    """Averaged weights: a sharded model."""
    device_type: str
    safe_globals: Sequence[Any] = ()
    """Classes that states may hold besides plain data."""
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name, item in {**self.shared, **self.own}.items():
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(
                    f"{name!r} is a {type(item).__name__}, which lacks state_dict() or load_state_dict(). Pass an "
                    "object that has both, such as a scheduler or a class of your own."
                )

    def content(self, step: int, scope: Scope, *, whole: bool) -> dict[str, Any]:
        """Return what to save beside weights and optimizer state. Collective: every rank.

        Args:
            step: The number of steps that are done.
            scope: The ranks.
            whole: Gather averaged weights on the first rank, for a checkpoint of kind ``full``.

        Raises:
            UnsafePickleError: At the first save: some state holds an object that could not be loaded.
        """
        shared = {name: item.state_dict() for name, item in self.shared.items()}
        own = {name: item.state_dict() for name, item in self.own.items()}
        by_rank: dict[str, Any] = {}
        for name in list(own):
            if not all_equal(scope, _digest(own[name])):
                by_rank[name] = gather_to_first(scope, own.pop(name))
        if not self._checked:
            on_all_ranks(lambda: _check_loadable({**shared, **own, **by_rank}, self.safe_globals), scope)
            if by_rank and scope.is_first:
                _log.warning(
                    "The state of %s differs between ranks. The run can only be resumed on %d ranks.",
                    name_list(sorted(by_rank)),
                    scope.size,
                )
            self._checked = True
        states = gather_to_first(scope, random_state(self.device_type))
        run = {
            "version": 1,
            "step": step,
            "ranks": scope.size,
            "shared": shared,
            "own": own,
            "by_rank": by_rank,
            "random": None if states is None else pack_random_states(states),
        }
        if self.averaged is None:
            return {"run": run}
        return {"run": run, "averaged": model_state_dict(self.averaged, "full" if whole else "sharded")}

    def restore(self, rest: Mapping[str, Any], scope: Scope) -> None:
        """Give all objects and generators the state that a checkpoint holds. Collective: every rank.

        Args:
            rest: What `load_checkpoint` returned.
            scope: The ranks.

        Raises:
            FormatError: The checkpoint was not written by a `CheckpointManager`. As the next one, raised before any
                object is changed.
            RunDirectoryError: It holds the states of other objects; or it needs as many ranks as saved it.
        """
        on_all_ranks(lambda: self._check(rest, scope), scope)
        run = rest["run"]
        if self.averaged is not None:
            load_model_state_dict(self.averaged, rest["averaged"])

        def own_part() -> None:
            for name, item in {**self.shared, **self.own}.items():
                if name in run["by_rank"]:
                    item.load_state_dict(run["by_rank"][name][scope.place])
                else:
                    item.load_state_dict(run["shared" if name in self.shared else "own"][name])
            if run["ranks"] == scope.size:
                restore_random_state(bytes(run["random"][scope.place].tolist()), self.device_type)
            elif scope.is_first:
                _log.warning(
                    "The random numbers of each rank continue only on as many ranks as saved them: %d, not %d. They "
                    "keep the states that this program gave them.",
                    run["ranks"],
                    scope.size,
                )

        on_all_ranks(own_part, scope)

    def _check(self, rest: Mapping[str, Any], scope: Scope) -> None:
        run = rest.get("run")
        if not isinstance(run, Mapping) or "by_rank" not in run:
            raise FormatError(
                "The checkpoint was not saved by a CheckpointManager. Load it with load_checkpoint(), and give the "
                "CheckpointManager a new directory."
            )
        stored = {*run["shared"], *run["own"], *run["by_rank"], *(["averaged"] if "averaged" in rest else [])}
        given = {*self.shared, *self.own, *(["averaged"] if self.averaged is not None else [])}
        if stored != given:
            raise RunDirectoryError(
                f"The checkpoint holds the state of {name_list(sorted(stored)) or 'no objects'}, and this run has "
                f"{name_list(sorted(given)) or 'none'}. Pass the same objects as in the run that saved it."
            )
        if run["by_rank"] and run["ranks"] != scope.size:
            raise RunDirectoryError(
                f"The state of {name_list(sorted(run['by_rank']))} differed between the {run['ranks']} ranks that "
                f"saved it, so it cannot be restored on {scope.size} ranks. Resume on {run['ranks']} ranks, or let "
                "its state_dict() hold what is the same on every rank, such as the number of samples consumed."
            )


def _digest(state: Any) -> str:
    def described(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return leaf.dtype, tuple(leaf.shape), hashlib.sha256(data).hexdigest()
        if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes"):
            return str(leaf.dtype), leaf.shape, hashlib.sha256(leaf.tobytes()).hexdigest()
        return repr(leaf)

    return repr(map_leaves(state, described))


def _check_loadable(states: Mapping[str, Any], safe_globals: Iterable[Any]) -> None:
    for name, state in states.items():
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        restricted_load(file, f"The state of {name!r}", safe_globals)
