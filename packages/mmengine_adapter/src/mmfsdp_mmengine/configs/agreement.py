"""Checks that all ranks have the same settings, before anything is built from them."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.collective import Scope, all_equal, broadcast_object, on_all_ranks, scope_of
from mmfsdp.errors import ConfigError, RankMismatchError
from mmfsdp_mmengine.configs.arguments import named

__all__ = ["check_alike", "check_runner"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # the address of an object differs from process to process


def check_alike(settings: Mapping[str, Any], scope: Scope) -> None:
    """Raise unless every rank has the same settings. Collective: every rank of the scope.

    Args:
        settings: Values by the names that users see. Not changed.
        scope: All ranks.

    Raises:
        RankMismatchError: A rank has another value than the first one; raised on every rank.
    """
    mine = {name: _ADDRESS.sub("", repr(named(value))) for name, value in settings.items()}
    if all_equal(scope, repr(sorted(mine.items()))):
        return
    first, host = broadcast_object(scope, (mine, socket.gethostname()))

    def compare() -> None:
        for name, value in mine.items():
            if value != first[name]:
                raise RankMismatchError(
                    f"{name} is {value} on rank {scope.rank} (host {socket.gethostname()!r}), but {first[name]} on "
                    f"rank 0 (host {host!r}). All ranks need the same value: let them read the same config "
                    "and data, and choose values that depend on the time, on random numbers or on local files (such "
                    "as a directory name) once, before the ranks start.",
                    config=name,
                )

    on_all_ranks(compare, scope)


def check_runner(runner: Any) -> None:
    """Raise unless every rank's runner uses the same directories and checkpoints. Collective: every rank.

    Args:
        runner: A FlexibleRunner or Runner.

    Raises:
        ConfigError: ``resume`` is a path, which MMEngine would take for True.
        RankMismatchError: See `check_alike`.
    """
    if isinstance(runner._resume, str | Path):
        raise ConfigError(
            f"resume must be True or False, got {runner._resume!r}. To resume from a certain checkpoint, write "
            f"resume=True and load_from={str(runner._resume)!r}.",
            config="resume",
        )
    settings = {"work_dir": runner.work_dir, "load_from": runner._load_from, "resume": runner._resume}
    check_alike(settings, scope_of(None))
