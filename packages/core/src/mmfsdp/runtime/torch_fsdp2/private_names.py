"""Checks that the installed torch has the private names that this folder uses, before anything is trained with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mmfsdp.basics.torch_releases import ACCUMULATES_IN_GRAD, HAS_SEVERAL_GROUPS, RUNS_UNITS_IN_PARTS, torch_has
from mmfsdp.basics.torch_version import NEWEST_TESTED_TORCH
from mmfsdp.errors import UnknownTorchError
from mmfsdp.runtime.torch_fsdp2.param_groups import groups_in_module

__all__ = ["check_private_names"]

_METHODS = (
    "pre_forward",
    "unshard",
    "wait_for_unshard",
    "pre_backward",
    "post_backward",
    "finalize_backward",
    "_to_unsharded",
    "_to_sharded",
    "_to_sharded_post_forward",
    "_register_state_dict_hooks",
)
_GROUP = (
    "fsdp_params",
    "is_sharded",
    "is_unsharded",
    "reduce_grads",
    "mesh_info",
    "post_forward_mesh_info",
    "_training_state.IDLE",
    "_all_gather_result",
    "_module_fqn",
    "_module_to_pre_save_state_dict_hook_handle",
)
_PARAM = (
    "sharded_param",
    "_param_fqn",
    "_module_info.module",
    "_module_info.param_name",
    "_module_info.shared_modules",
    "_module_info.shared_param_names",
)
_ACCUMULATING = ("unsharded_accumulated_grad", "to_accumulated_grad_if_needed")
_STATE = (
    "_lazy_init",
    "_pre_backward",
    "_register_root_post_backward_final_callback",
    "_training_state.IDLE",
    "_is_root",
    "_state_ctx",
    "_comm_ctx",
)
_IN_PARTS = ("_modules_to_run_forward", "_pre_forward", "_post_forward", "_mp_policy")
_DTENSOR = ("_op_dispatcher._custom_op_handlers",)
_OWN_GRADIENTS = "torch.distributed.fsdp._fully_shard._fsdp_grad"
"""Where torch's main branch keeps `FSDPGrad`: gradients whose reading runs collectives."""

_checked = False


def check_private_names(module: FSDPModule) -> None:
    """Check, once in a process, that torch has the private names that mmfsdp uses. Not collective.

    Args:
        module: A module that ``fully_shard`` has just sharded.

    Raises:
        UnknownTorchError: torch lacks one of them, or keeps gradients in a form that mmfsdp does not know.
    """
    global _checked
    if not _checked:
        if lacking := [*_lacking(module)]:
            raise _unknown(f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing")
        if importlib.util.find_spec(_OWN_GRADIENTS) is not None:
            raise _unknown("gradients of shards are kept in a form of torch's own (FSDPGrad)")
        _checked = True


def _lacking(module: FSDPModule) -> Iterator[str]:
    yield from _absent("DTensor", DTensor, _DTENSOR)
    state: Any = module._get_fsdp_state()
    yield from _absent("FSDPState", state, _STATE if torch_has(RUNS_UNITS_IN_PARTS) else _STATE + _IN_PARTS)
    groups = "_fsdp_param_groups" if torch_has(HAS_SEVERAL_GROUPS) else "_fsdp_param_group"
    if not hasattr(state, groups):
        yield f"FSDPState.{groups}"
        return
    for group in groups_in_module(module)[:1]:
        yield from (f"{type(group).__name__}.{name}()" for name in _METHODS if not callable(getattr(group, name, None)))
        yield from _absent(type(group).__name__, group, _GROUP)
        if not hasattr(type(group), "_all_gather_process_group"):
            yield f"{type(group).__name__}._all_gather_process_group"
        for param in getattr(group, "fsdp_params", ())[:1]:
            kind = type(param).__name__
            yield from _absent(kind, param, _PARAM if torch_has(ACCUMULATES_IN_GRAD) else _PARAM + _ACCUMULATING)
            if not hasattr(type(param), "unsharded_param"):
                yield f"{kind}.unsharded_param"


def _absent(kind: str, owner: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = owner
        for part in name.split("."):
            if not hasattr(value, part):
                yield f"{kind}.{name}"
                break
            value = getattr(value, part)


def _unknown(what: str) -> UnknownTorchError:
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    return UnknownTorchError(
        f"torch {torch.__version__} works differently inside fully_shard than the releases that mmfsdp knows: {what}. "
        f"Training could silently go wrong, so shard() stops here. Install torch {newest} or older (pip install "
        f"'torch<={newest}.*'), or a newer mmfsdp, or use engine 'fsdp1'."
    )
