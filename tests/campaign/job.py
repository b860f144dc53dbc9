"""Runs the ranks of a job, and starts them again as torchrun does, but by a fork, which takes milliseconds.

If a rank fails, the others get SIGTERM, and 30 s later SIGKILL; then all start again. If a node leaves, the ranks of
the other one start again alone; if one comes, all get SIGTERM, and start again with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.campaign.board import Board
from tests.distributed.hosts import INTERFACE, Host

__all__ = ["TWO_HOSTS", "UNDER_MMENGINE", "Job", "die_with_parent", "is_alive"]

TWO_HOSTS = ("hosts", "mmengine_hosts")
"""Kinds of runs with a rank on each of two hosts, whose disks are their own."""
UNDER_MMENGINE = ("mmengine", "mmengine_hosts")
"""Kinds of runs that MMEngine's runner does."""

_GRACE = 30.0  # seconds between SIGTERM and SIGKILL
_TIMEOUT = 40  # seconds in which ranks must meet, and a collective must end
_PR_SET_PDEATHSIG = 1


class Job:
    """A job of ranks on one node or more, each forked from this process, which should have one thread.

    Args:
        folder: The run's folder: checkpoints are in ``run``, the output in ``log``.
        settings: See training.py, which also has the program.
        chance: Where random choices come from.
        hosts: Hosts in namespaces, if each is a node. Otherwise nodes are ranks that come and go together.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], chance: random.Random, hosts: Sequence[Host] = ()
    ) -> None:
        self.folder, self.settings, self.chance, self.hosts = folder, settings, chance, hosts
        self.nodes = [1, 1] if settings["kind"] in ("elastic", *TWO_HOSTS) else [2]
        """How many ranks each node has."""
        self.launches = 0
        self.endings: Counter[int] = Counter()
        """How many ranks ended with which code; negative ones are signals."""
        (folder / "settings.json").write_text(json.dumps(settings))
        self.board = Board(folder)
        self._running: dict[int, int] = {}  # the processes that have not ended, and the nodes they are on
        self._ended: list[int] = []
        self._kill_at: float | None = None

    def launch(self) -> None:
        """Start all ranks."""
        self.launches += 1
        self._ended, self._kill_at = [], None
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = self.hosts[0].address if self.hosts else "127.0.0.1"
        nodes = [node for node, ranks in enumerate(self.nodes) for _ in range(ranks)]
        for rank, node in enumerate(nodes):
            environ = {"RANK": rank, "WORLD_SIZE": len(nodes), "MASTER_ADDR": address, "MASTER_PORT": port}
            environ["MMFSDP_TIMEOUT"] = _TIMEOUT
            pid = os.fork()
            if pid == 0:
                self._become_rank({name: str(value) for name, value in environ.items()}, node)
            self._running[pid] = node

    def _become_rank(self, environ: dict[str, str], node: int) -> None:
        """Be a rank, to its end."""
        code = 1
        try:
            die_with_parent()
            atexit._clear()
            if self.hosts:
                self.hosts[node].enter()
                environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            with (self.folder / "log").open("ab") as log:
                for number in (1, 2):
                    os.dup2(log.fileno(), number)
            faulthandler.enable()
            os.environ.update(environ)
            if self.settings["kind"] in UNDER_MMENGINE:
                from tests.campaign import under_mmengine

                under_mmengine.main(self.folder, self.settings)
            else:
                from tests.campaign.training import main

                main(self.folder)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stderr.flush()
            os._exit(code)

    def is_done(self) -> bool:
        """Start again what has failed, and tell whether all ranks have ended with 0."""
        for pid in [*self._running]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                self.endings[code] += 1
                self._ended.append(code)
                if code != 0:
                    self.restart()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.signal_ranks([*self._running], signal.SIGKILL)
        if not self._running and self._kill_at is not None:
            self.launch()
        return not self._running

    def restart(self) -> None:
        """End all ranks, so that they start again. At first they are asked to."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _GRACE
            self.signal_ranks([*self._running], signal.SIGTERM)

    def ranks(self, node: int | None = None) -> list[int]:
        """Return the processes of the ranks that have not ended, all of them or those of one node."""
        return [pid for pid, on in self._running.items() if node in (None, on) and is_alive(pid)]

    def any_rank(self) -> list[int]:
        """Return one of them, or none if there is none."""
        pids = self.ranks()
        return [self.chance.choice(pids)] if pids else []

    def signal_ranks(self, pids: list[int], number: int) -> bool:
        """Send a signal to processes, and tell whether there was one."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def end(self, *, stacks: bool = False) -> None:
        """End all ranks; they write their stacks into the log before, if asked to."""
        if stacks and self.signal_ranks(self.ranks(), signal.SIGUSR2):
            time.sleep(1.0)
        self.signal_ranks([*self._running], signal.SIGKILL)
        for pid in self._running:
            os.waitpid(pid, 0)
        self._running.clear()


def die_with_parent() -> None:
    """Let the kernel kill this process once the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs, or could."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
