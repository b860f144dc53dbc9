"""Starts the process group, with gloo or NCCL as the machine allows, with or without a launcher."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import init_dist

from mmfsdp import init_process_group
from mmfsdp.errors import ConfigError, closest
from mmfsdp_mmengine.configs.environment import check_dist_cfg
from mmfsdp_mmengine.processes.leaving import leave_in_order

__all__ = ["pick_backend", "start_alone", "start_process_group"]

_BOTH = "cpu:gloo,cuda:nccl"  # offloaded parameters and checkpoints communicate between CPUs

# Environment variables of launchers: rank, world size, rank on this machine.
_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_PER_MACHINE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def pick_backend(asked: str | None) -> str:
    """Return the backend to use: the one given, or gloo if NCCL was given and there is no GPU.

    Raises:
        ConfigError: torch knows no such backend.
    """
    if asked in (None, "nccl", _BOTH):
        return _BOTH if torch.cuda.is_available() else "gloo"
    known = dist.Backend.backend_list
    for name in (part.rpartition(":")[2] for part in asked.split(",")):
        if name.lower() not in known:
            raise ConfigError(
                f"{name!r} is no backend of torch.{closest(name, known)} Write 'nccl' for GPUs, which becomes 'gloo' "
                "where there is none.",
                config="env_cfg.dist_cfg.backend",
            )
    return asked


def start_process_group(launcher: str, backend: str | None = None, **kwargs: Any) -> None:
    """Start the process group of a launcher's processes. Collective: every process.

    Args:
        launcher: ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        backend: torch's backend. Configs say ``'nccl'``; without a GPU that becomes ``'gloo'``.
        **kwargs: ``timeout`` in seconds, ``port`` of the first machine, and arguments of
            ``torch.distributed.init_process_group``.

    Raises:
        ConfigError: The launcher, the backend or an argument is unknown, or an environment variable of the launcher is
            not set.
    """
    check_dist_cfg(kwargs)
    if get_device() not in ("cpu", "cuda"):
        init_dist(launcher, backend or "nccl", **kwargs)
        return
    if launcher not in _VARIABLES:
        raise ConfigError(f"launcher must be one of {', '.join(map(repr, _VARIABLES))} or 'none', got {launcher!r}.")
    rank_name, size_name, local_name = _VARIABLES[launcher]
    for name in (rank_name, size_name):
        if name not in os.environ:
            raise ConfigError(
                f"launcher {launcher!r} sets the environment variable {name}, but it is not set. Start the program "
                "with that launcher, or use launcher='none' for a single process."
            )
    rank, world_size = int(os.environ[rank_name]), int(os.environ[size_name])
    devices = torch.cuda.device_count() or world_size
    local_rank = int(os.environ.get(local_name, rank % devices))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if launcher != "pytorch":  # MMEngine and other code for torchrun reads these variables
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
        init_process_group(pick_backend(backend), **kwargs)
    else:
        dist.init_process_group(pick_backend(backend), rank=rank, world_size=world_size, **kwargs)
    leave_in_order()


def start_alone(backend: str | None = None, **kwargs: Any) -> None:
    """Start a process group of this process alone, which lets a sharding config run without a launcher.

    Args:
        backend: See `start_process_group`.
        **kwargs: The other arguments of `start_process_group`; a process alone needs none of them.

    Raises:
        ConfigError: The backend or an argument is unknown.
    """
    check_dist_cfg(kwargs)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(pick_backend(backend), store=store, rank=0, world_size=1)


def _first_machine(launcher: str, world_size: int) -> str:
    if launcher == "slurm":
        command = ["scontrol", "show", "hostname", os.environ.get("SLURM_NODELIST", "")]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise ConfigError(
                f"The address of the first machine is unknown: {' '.join(command)!r} failed ({error}). Set MASTER_ADDR "
                "to that address."
            ) from error
    if str(world_size) in ("1", *(os.environ.get(name) for name in _PER_MACHINE)):
        return "127.0.0.1"
    raise ConfigError("MASTER_ADDR is not set. Set this environment variable to the address of the first machine.")
