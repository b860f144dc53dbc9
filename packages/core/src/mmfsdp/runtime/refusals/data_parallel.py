"""Refuses DistributedDataParallel around a sharded model, which frameworks put there unless told otherwise."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.sharded_model import live_models

__all__ = ["watch_wrappers"]

_hooks: list[Any] = []


def watch_wrappers() -> None:
    """From now on, raise where DistributedDataParallel is made for a model with sharded parameters. Not collective.

    A model that names them in ``_ddp_params_and_buffers_to_ignore``, as torch has it, may be wrapped.
    """
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_on_registration))


def _on_registration(holder: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(holder, DistributedDataParallel) or name != "module" or module is None:
        return
    held = {id(submodule) for submodule in module.modules()}
    for state in live_models():
        if id(state.module) not in held:
            continue
        prefix = next(
            f"{fqn}." if fqn else "" for fqn, submodule in module.named_modules() if submodule is state.module
        )
        names = [prefix + fqn for fqn, param in state.module.named_parameters()]
        fqn = next((clean_fqn(name) for name in names if name not in holder.parameters_to_ignore), None)
        if fqn is not None:
            raise ShardStateError(
                f"DistributedDataParallel was given {fqn!r}, which mmfsdp has sharded: it would average pieces of "
                "different parameters, and a sharded model averages its gradients itself. Use the sharded model as it "
                "is. Frameworks that wrap every model must be told: with accelerate prepare the optimizer alone, with "
                "Lightning Fabric call setup_optimizers() alone, and with transformers.Trainer use the subclass that "
                "docs/howto/frameworks.md shows.",
                fqn=fqn,
            )
