"""Starting the process group: gloo or NCCL by what the machine has, with a launcher or without."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import init_dist

from mmfsdp.errors import ConfigError

__all__ = ["leave_in_order", "pick_backend", "start_alone", "start_process_group"]

_BOTH = "cpu:gloo,cuda:nccl"  # offloaded parameters and checkpoints talk between CPUs

# Environment variables of launchers: rank, world size, rank on this machine.
_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_PER_MACHINE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def pick_backend(asked: str | None) -> str:
    """Return the backend to use: what was asked for, unless that is NCCL's and there is no GPU."""
    if asked in (None, "nccl", _BOTH):
        return _BOTH if torch.cuda.is_available() else "gloo"
    return asked


def start_process_group(launcher: str, backend: str | None = None, **kwargs: Any) -> None:
    """Start the world of a launcher's processes. Collective: every process.

    Args:
        launcher: ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        backend: torch's backend. Configs say ``'nccl'``; without a GPU that becomes ``'gloo'``.
        **kwargs: ``timeout`` in seconds, ``port`` of the first machine, and arguments of
            ``torch.distributed.init_process_group``.

    Raises:
        ConfigError: The launcher is unknown, or one of its environment variables is not set.
    """
    if get_device() not in ("cpu", "cuda"):
        init_dist(launcher, backend or "nccl", **kwargs)
        return
    if launcher not in _VARIABLES:
        raise ConfigError(f"launcher is one of {', '.join(map(repr, _VARIABLES))} or 'none', got {launcher!r}.")
    rank_name, size_name, local_name = _VARIABLES[launcher]
    for name in (rank_name, size_name):
        if name not in os.environ:
            raise ConfigError(
                f"launcher {launcher!r} sets the environment variable {name}, which is not there. Start the program "
                "with that launcher, or use launcher='none' for a single process."
            )
    rank, world_size = int(os.environ[rank_name]), int(os.environ[size_name])
    devices = torch.cuda.device_count() or world_size
    local_rank = int(os.environ.get(local_name, rank % devices))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if launcher != "pytorch":  # MMEngine, and what else is written for torchrun, reads its variables
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    port = kwargs.pop("port", None)
    kwargs.pop("init_backend", None)
    if isinstance(kwargs.get("timeout"), int | float):
        kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
    if "init_method" not in kwargs and "store" not in kwargs:
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = _first_machine(launcher, world_size)
        if port is not None:
            os.environ["MASTER_PORT"] = str(port)
        os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(pick_backend(backend), rank=rank, world_size=world_size, **kwargs)
    leave_in_order()


def leave_in_order() -> None:
    """When this process ends, leave the process group, whoever started it; at once if an error ends it.

    Calling it again changes nothing.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def start_alone(backend: str | None = None, **kwargs: Any) -> None:
    """Start a world of this process alone, so that a sharding config runs without a launcher."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(pick_backend(backend), store=store, rank=0, world_size=1)


def _first_machine(launcher: str, world_size: int) -> str:
    if launcher == "slurm":
        command = ["scontrol", "show", "hostname", os.environ.get("SLURM_NODELIST", "")]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise ConfigError(
                f"The first machine is not known: {' '.join(command)!r} does not tell it ({error}). Set MASTER_ADDR to "
                "its address."
            ) from error
    if str(world_size) in ("1", *(os.environ.get(name) for name in _PER_MACHINE)):
        return "127.0.0.1"
    raise ConfigError("MASTER_ADDR, the address of the first machine, is not set in the environment.")


def _leave() -> None:
    if dist.is_initialized():
        _leave_group()
    _wait_for_gloo_threads()


def _leave_group() -> None:
    """Gloo's threads abort a process that ends while others still talk to it: wait for them, but not for the dead."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if failed and dist.get_world_size() > 1:
        # Its error is printed. The others wait for this rank in a collective, and leaving the group would wait for
        # them: end now, so that the launcher stops them.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    with contextlib.suppress(RuntimeError):
        if "gloo" in str(dist.get_backend_config()):
            dist.monitored_barrier(timeout=timedelta(seconds=5))
        dist.destroy_process_group()


def _wait_for_gloo_threads() -> None:
    """Let gloo's threads drop the tensors of the last collectives, for a second at most.

    They do so after the collective has returned, and need Python for it. One that comes late, when Python has begun to
    shut down, ends the process with SIGABRT although all its work is done. Destroying the group joins its threads only
    if nothing refers to it any more; device meshes and torch's caches do. There is nothing to wait on, so this looks
    (on Linux) whether any of them is running or wants to.
    """
    quiet, deadline = 0, time.monotonic() + 1
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.002)  # lets go of the interpreter lock
        quiet = 0 if any(map(_is_busy_gloo_thread, Path("/proc/self/task").glob("*/stat"))) else quiet + 1


def _is_busy_gloo_thread(stat: Path) -> bool:
    """Return whether a ``/proc/[pid]/stat`` file (proc(5)) is of a worker of gloo's that is not asleep."""
    try:
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread has ended
        return False
    return name == "pt_gloo_runloop" and rest.split()[0] != "S"
