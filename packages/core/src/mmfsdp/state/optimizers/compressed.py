"""Stores compressed optimizer state as the values it stands for, and compresses it anew when it is loaded.

Optimizers such as torchao's AdamW8bit keep tensor subclasses of torch's protocol for wrappers (``__tensor_flatten__``),
whose parts (codes and a scale for each block of elements) depend on which elements a rank holds. The values do not:
they load on any number of ranks, into any optimizer with the same state, and need no class of another package.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.runtime.refusals.guards import unwatched

__all__ = [
    "COMPRESSED",
    "compress_state",
    "compressed_names",
    "first_state",
    "is_compressed",
    "names_of_compressed",
    "plain_value",
    "recompress",
]

COMPRESSED = "compressed"
"""The key beside ``state`` and ``param_groups`` under which a state says which entries were compressed, and how."""


def is_compressed(value: Any) -> bool:
    """Return whether this rank holds a tensor as a wrapper around other tensors."""
    local = _local(value)
    return isinstance(local, torch.Tensor) and _is_wrapper(local) and not isinstance(local, DTensor)


@torch.no_grad()
def plain_value(value: Any, *, cpu_offload: bool = False) -> Any:
    """Return a compressed value as a plain tensor or DTensor of ``float32``, and any other value as it is.

    Not collective.

    Args:
        value: An entry of an optimizer's state.
        cpu_offload: Put what was compressed into CPU memory, where it takes several times as much.
    """
    if not is_compressed(value):
        return value
    local = _local(value)
    # This is how torch asks a wrapper for its values: they dispatch copy_ whichever of the two tensors they are.
    plain = torch.empty(local.shape, dtype=torch.float32, device=local.device).copy_(local)
    if isinstance(value, DTensor):
        plain = _placed_as(plain, value)
    return plain.cpu() if cpu_offload else plain


def compressed_names(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the entries that this rank holds compressed, each with its class. Not collective."""
    return {
        name: f"{type(_local(value)).__module__}.{type(_local(value)).__qualname__}"
        for entries in state.values()
        for name, value in entries.items()
        if is_compressed(value)
    }


def names_of_compressed(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the names of entries that a stored state names as compressed."""
    names = state_dict.get(COMPRESSED)
    return [*names] if isinstance(names, Mapping) else []


@torch.no_grad()
def first_state(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state that an optimizer makes for this rank's part of a parameter in a first step. Not collective.

    The step is done with zeros: neither the optimizer nor the parameter is changed.

    Args:
        optimizer: The optimizer.
        group: The param group of the parameter.
        param: The parameter.
    """
    local = _local(param)
    like = torch.nn.Parameter(torch.zeros_like(local))
    like.grad = torch.zeros_like(local)
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})  # of schedulers
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**{key: copy.copy(value) for key, value in group.items()}, "params": [like]}]
    with unwatched(), torch.compiler.set_stance("force_eager"):  # of a step that will not be done again
        shadow.step()
    return dict(shadow.state[like])


@torch.no_grad()
def recompress(value: torch.Tensor, template: Any) -> torch.Tensor:
    """Return a plain tensor or DTensor with its local part compressed as ``template`` is, if that is compressed."""
    if not is_compressed(template):
        return value
    template.copy_(_local(value))
    return _placed_as(template, value) if isinstance(value, DTensor) else template


def compress_state(optimizer: Optimizer, names: Iterable[str]) -> None:
    """Compress the named entries of an optimizer's state as the optimizer itself would have done. Not collective."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = optimizer.state.get(param, {})
            if found := [name for name in names if isinstance(entries.get(name), torch.Tensor)]:
                first = first_state(optimizer, group, param)
                entries.update({name: recompress(entries[name], first.get(name)) for name in found})


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__")


def _placed_as(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
