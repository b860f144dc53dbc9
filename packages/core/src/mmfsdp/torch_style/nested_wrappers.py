"""Lets the `load_state_dict()` of a module that holds a wrapped model load into the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.state.model import load_model_state_dict

__all__ = ["load_from_outside"]


def load_from_outside(wrapper: nn.Module) -> None:
    """Make the state dicts of modules around a wrapper loadable. Not collective; such a load is collective.

    torch loads module by module, and copies each value into its parameter. It looks for the wrapped module's values
    under ``module.``, and cannot copy whole tensors into DTensors. Therefore the wrapper loads its values first, and
    hands torch the parameters' own.

    Args:
        wrapper: A wrapper with the module under ``module``; not one of engine ``fsdp1``, which torch loads into.
    """
    wrapper.register_load_state_dict_pre_hook(_load)


def _load(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    own = {key.removeprefix(prefix): state_dict.pop(key) for key in [*state_dict] if key.startswith(prefix)}
    load_model_state_dict(wrapper, own, strict=False)
    loaded = find_sharded_model(wrapper).module.state_dict()
    for key, value in own.items():
        fits = key in loaded and isinstance(value, torch.Tensor) and value.shape == loaded[key].shape
        state_dict[f"{prefix}module.{key}"] = loaded[key] if fits else value  # torch reports what does not fit
