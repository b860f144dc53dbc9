"""Finds codes of few bits that a state dict has where the model has numbers, and refuses those nobody can restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.codes import codes_in_units, other_codes, scales_of
from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["REMEDY", "codes_for_numbers", "names_held", "refuse_codes"]

REMEDY = "Load the model with the library that wrote it, and save it unquantised."
_ALWAYS_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_BYTES = (torch.int8, torch.uint8)


def codes_for_numbers(tensors: Mapping[str, Any], state: ShardedModel) -> dict[str, str]:
    """Return the names of codes and of their scales, where the model has numbers. Not collective.

    Codes that the model holds itself are left out: it has a tensor of the same dtype, or their scales.

    Args:
        tensors: Objects with a dtype and a shape, by the unsharded model's names.
        state: The model's state.

    Raises:
        StateDictError: The model has numbers where the tensors are codes that cannot be restored.
    """
    if all(value.dtype in _ALWAYS_NUMBERS for value in tensors.values()):
        return {}
    params, own = _dtypes_of_params(state), names_held(state)
    lacking = {name for name, dtype in own.items() if name in tensors and _name(tensors[name].dtype) != dtype}
    found = {name: scale for name, scale in scales_of(tensors).items() if name in lacking and scale not in own}
    _refuse_others(tensors, own, lacking - {*found})
    twins = {id(tensors[name]) for name in found}  # a tied weight has scales under one of its names
    _refuse_bytes(tensors, params, {name for name in lacking if id(tensors[name]) not in twins}, found)
    return found


def names_held(state: ShardedModel) -> dict[str, str]:
    """Return the names of the model's parameters and buffers, each with its dtype."""
    buffers = {clean_fqn(name): _name(buffer.dtype) for name, buffer in state.module.named_buffers()}
    return {**buffers, **_dtypes_of_params(state)}


def refuse_codes(module: nn.Module) -> None:
    """Make torch's own ``load_state_dict()`` of a sharded root refuse codes, which it would take for numbers.

    Args:
        module: The sharded root.
    """
    handle = module.register_load_state_dict_pre_hook(_check)
    # Before the hook of torch's FSDP1, which joins shards to flat parameters; torch has no public way to say so.
    module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def _check(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    tensors = {
        clean_fqn(name.removeprefix(prefix)): value
        for name, value in state_dict.items()
        if name.startswith(prefix) and isinstance(value, torch.Tensor)
    }
    found = codes_for_numbers(tensors, find_sharded_model(module))
    for name, scale in found.items():
        how = (
            "Load the checkpoint's files with mmfsdp.load_pretrained() or mmfsdp.load_checkpoint(), which restore them."
            if isinstance(tensors[name], DTensor)
            else "Use mmfsdp.load_model_state_dict(model, state_dict), which restores them."
        )
        raise StateDictError(
            f"load_state_dict() takes {prefix + name!r} for numbers, but it is {_name(tensors[name].dtype)} with "
            f"scales in {prefix + scale!r}. {how}"
        )


def _dtypes_of_params(state: ShardedModel) -> dict[str, str]:
    return {name: param.dtype for param in state.plan.all_params() for name in (param.fqn, *param.aliases)}


def _refuse_others(tensors: Mapping[str, Any], own: Mapping[str, str], lacking: set[str]) -> None:
    """Raise if the model has numbers for codes that are not restored here."""
    for name, codes in other_codes(tensors).items():
        is_own = name in own or (codes.weight in tensors and codes.weight not in lacking)
        if codes.weight in own and not is_own:
            raise StateDictError(
                f"{name!r} is of weights quantised by {codes.kind}, which mmfsdp does not restore, and the model's "
                f"{codes.weight!r} is {own[codes.weight]}. {REMEDY}"
            )
    for name, scale in codes_in_units(tensors).items():
        if name in lacking and scale not in own:
            raise StateDictError(
                f"{name!r} is {_name(tensors[name].dtype)} in units of {scale!r}, which mmfsdp does not read, and the "
                f"model's is {own[name]}: loading it would take codes for numbers. {REMEDY}"
            )


def _refuse_bytes(
    tensors: Mapping[str, Any], params: Mapping[str, str], lacking: set[str], found: Mapping[str, str]
) -> None:
    """Raise if a parameter would be loaded from codes without scales."""
    for name in sorted(lacking & {*params}):
        dtype = tensors[name].dtype
        if dtype in _BYTES and params[name].startswith(("float", "bfloat")):
            raise StateDictError(
                f"{name!r} is {_name(dtype)}, and the model's is {params[name]}: these are codes, and nothing says "
                f"what they stand for. {REMEDY} If they are numbers, cast them to {params[name]} before."
            )
        if found and dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            other = next(iter(found))
            raise StateDictError(
                f"{name!r} is {_name(dtype)} and has no scale beside it, as {other!r} has with {found[other]!r}. Is a "
                "file of the checkpoint missing?"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
