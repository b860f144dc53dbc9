"""Chooses the device of a rank, before anything is sent, and respects a device that the program chose."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.errors import ConfigError, MeshError

__all__ = [
    "backends_of",
    "check_offload",
    "current_accelerator",
    "device_index",
    "device_of",
    "pick_device_type",
    "select_device",
    "select_device_for_objects",
]


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return device type to backend for a process group; None is the whole world. Not collective."""
    return dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)


def current_accelerator() -> str | None:
    """Return the type of this machine's accelerator, or None."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def pick_device_type(wanted: str, accelerator: str | None, backends: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the device type to shard on, and for ``'auto'`` why it is not the accelerator. Pure.

    Args:
        wanted: ``'auto'`` or a device type.
        accelerator: Type of this machine's accelerator, or None.
        backends: Device type to backend of the process group; see `backends_of`.

    Raises:
        MeshError: The wanted device type is unknown, is missing on this machine, or has no backend.
    """
    if wanted == "auto":
        if accelerator is None:
            return "cpu", None
        # Gloo copies an accelerator's tensors through the CPU, and lacks operations that sharding needs there.
        backend = backends.get(accelerator)
        if backend not in (None, "gloo"):
            return accelerator, None
        if "cpu" in backends:
            return "cpu", (
                f"this machine has an accelerator ({accelerator}), but the process group has "
                f"{'no backend' if backend is None else 'only gloo'} for it, so the CPU computes. "
                f"{_remedy(accelerator)}Write init.device: cpu if this is intended."
            )
        wanted = accelerator
    try:
        wanted = torch.device(wanted).type  # an extension may have given 'privateuseone' another name
    except RuntimeError:
        raise MeshError(
            f"init.device is {wanted!r}, which this torch does not know. Import the extension that registers it, or "
            "use 'auto' or 'cpu'.",
            config="init.device",
        ) from None
    if wanted not in ("cpu", accelerator):
        other = "" if accelerator is None else f", only {accelerator}"
        raise MeshError(
            f"init.device is {wanted!r}, but torch sees no {wanted.upper()} device{other}. Use 'auto' or 'cpu'.",
            config="init.device",
        )
    if backends and wanted not in backends:
        listed = ", ".join(f"{device}: {backend}" for device, backend in backends.items())
        remedy = _remedy(accelerator) if accelerator else "Call init_process_group('gloo')."
        raise MeshError(
            f"init.device is {wanted!r}, but the process group has no backend for it (it has {listed}). "
            + remedy.strip(),
            config="init.device",
        )
    return wanted, None


def check_offload(device_type: str, backends: Mapping[str, str]) -> None:
    """Raise for offloading to the CPU if the process group cannot reduce there. Pure.

    Args:
        device_type: The device type that the ranks compute on.
        backends: Device type to backend of the mesh's groups.

    Raises:
        ConfigError: There is no backend for the CPU.
    """
    if backends and "cpu" not in backends:
        listed = ", ".join(f"{device}: {backend}" for device, backend in backends.items())
        raise ConfigError(
            "With cpu_offload gradients are in CPU memory, where clipping and checkpoints reduce them, but the process "
            f"group has no backend for the CPU (it has {listed}). {_remedy(device_type).strip()}",
            config="cpu_offload",
        )


def device_index(local_rank: int, count: int) -> int:
    """Return the index of a process's device. Pure.

    Args:
        local_rank: Rank of the process on its machine.
        count: Devices that the process sees.

    Raises:
        MeshError: There are fewer devices than processes.
    """
    if count == 1:
        return 0  # the launcher shows each process its own
    if local_rank >= count:
        raise MeshError(
            f"LOCAL_RANK is {local_rank}, but this process sees {count} devices. Start at most {count} processes on "
            f"this machine (torchrun --nproc-per-node {count}), or show it more devices."
        )
    return local_rank


def select_device(device_type: str) -> None:
    """Make this process's accelerator the current one, unless the program has used one already. Not collective.

    That is the device that the process group was bound to, or the one at index ``LOCAL_RANK``, which launchers set.

    Raises:
        MeshError: See `device_index`.
    """
    if device_type in ("cpu", "meta"):
        return
    module = torch.get_device_module(device_type)
    if getattr(module, "is_initialized", lambda: True)():
        return  # the program chose
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.index is not None:
        module.set_device(bound.index)
        return
    count = module.device_count()
    local_rank = os.environ.get("LOCAL_RANK")
    module.set_device(device_index(int(local_rank), count) if local_rank else dist.get_rank() % max(count, 1))


def select_device_for_objects() -> None:
    """Select this process's device if the process group can send objects through accelerators only. Not collective.

    Otherwise every rank would send through device 0 of its machine, and NCCL would raise an error.
    """
    backends = backends_of() if dist.is_initialized() else {}
    if backends and "cpu" not in backends:
        select_device(next(iter(backends)))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _remedy(accelerator: str) -> str:
    """Return how to start a process group for the CPU and an accelerator, or an empty string."""
    try:
        backend = dist.get_default_backend_for_device(accelerator)
    except ValueError:
        return ""
    return "" if backend == "gloo" else f"Call init_process_group('cpu:gloo,{accelerator}:{backend}') to use both. "
