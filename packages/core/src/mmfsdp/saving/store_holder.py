"""Names the job that holds a directory in a store, where there are no locks: the one that came last."""

from __future__ import annotations

import json
import os
import secrets

from mmfsdp.errors import RunDirectoryError
from mmfsdp.saving.stores import Store

__all__ = ["StoreHolder"]

_NAME = "holder.json"


class StoreHolder:
    """This job, as the one that holds a directory from now on. Not collective: for one rank.

    Args:
        store: The directory.

    Raises:
        CheckpointError: The store cannot be written.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = {"host": os.uname().nodename, "pid": os.getpid(), "token": secrets.token_hex(8)}
        store.write(_NAME, json.dumps(self._own).encode())

    def check(self) -> None:
        """Raise a ``RunDirectoryError`` if another job holds the directory by now."""
        held = self._store.read(_NAME)
        if held is not None and (holder := json.loads(held)) != self._own:
            raise RunDirectoryError(
                f"Process {holder.get('pid', '?')} on host {holder.get('host', '?')!r} has opened the directory of "
                "this run. This job saves nothing more: end it, or let the other one use another directory.",
                file=str(self._store.path),
            )
