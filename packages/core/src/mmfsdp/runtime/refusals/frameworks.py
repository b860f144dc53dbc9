"""Refuses calls of other libraries that would damage a sharded model, and says what to call instead.

These are DistributedDataParallel around it, copies such as those of torch's AveragedModel,
``resize_token_embeddings()`` of transformers, ``save_pretrained()`` of transformers, diffusers and peft, and the saves
of optimizers in accelerate, in Lightning Fabric, and in the Trainer of transformers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

import torch.nn as nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import ShardStateError, UnsupportedCallError
from mmfsdp.runtime.sharded_model import live_models

__all__ = ["guard_optimizer_saves", "guard_save_pretrained", "refuse_copies", "refuse_resizing", "watch_wrappers"]

_FIRST_RANK_SAVES = {
    ("accelerate", "save_accelerator_state"): "accelerator.save_state()",
    ("lightning", "get_optimizer_state"): "Fabric.save()",
    ("lightning_fabric", "get_optimizer_state"): "Fabric.save()",
    ("transformers", "_save_optimizer_and_scheduler"): "Trainer",
}
"""Functions that save an optimizer's state from the first rank: package and name, and what a user calls."""

_guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def refuse_copies(module: nn.Module) -> None:
    """Make ``copy.deepcopy()`` of a sharded model say what to write; torch refuses it, too. Not collective."""
    vars(module)["__deepcopy__"] = _refuse_copy


def _refuse_copy(*_: Any) -> NoReturn:
    raise UnsupportedCallError(
        "A sharded model cannot be copied with copy.deepcopy(), as torch.optim.swa_utils.AveragedModel does. For "
        "averages of its weights write mmfsdp.AveragedModel(model, decay=0.999). For a second model, build one, shard "
        "it, and load mmfsdp.model_state_dict(model, 'sharded') with mmfsdp.load_model_state_dict()."
    )


def guard_save_pretrained(module: nn.Module) -> None:
    """Make ``save_pretrained()`` of a sharded model raise, unless it is given a state dict. Not collective.

    Args:
        module: The module that was sharded; one without the method is left as it is.
    """
    original = getattr(type(module), "save_pretrained", None)
    if original is None:
        return
    me = weakref.ref(module)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Mapping) for value in (*args, kwargs.get("state_dict"))):
            return original(me(), *args, **kwargs)
        raise UnsupportedCallError(
            "save_pretrained() would write this rank's shards. Call mmfsdp.save_checkpoint(path, model, kind='hf', "
            "like=FOLDER) on every rank, where FOLDER is a Hugging Face folder of the same model, for its config.json "
            "and tokenizer. Or call mmfsdp.model_state_dict(model) on every rank, and on the first one "
            "model.save_pretrained(path, state_dict=...) with its result."
        )

    module.save_pretrained = save_pretrained  # type: ignore[assignment]


def guard_optimizer_saves(optimizer: Optimizer) -> None:
    """Make saves of an optimizer by frameworks that write from the first rank alone raise. Not collective.

    Args:
        optimizer: One of a sharded model: each rank holds the state of its shards. A guarded one stays guarded.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper is an Optimizer without hooks
    if optimizer not in _guarded:
        _guarded.add(optimizer)
        optimizer.register_state_dict_pre_hook(_check_saver)


def _check_saver(optimizer: Optimizer) -> None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if saver := _FIRST_RANK_SAVES.get((package, frame.f_code.co_name)):
            raise UnsupportedCallError(
                f"{saver} would write this {type(optimizer).__name__} from the first rank, which has only its own "
                "shards. Save with mmfsdp.save_checkpoint(path, model, optimizer) on every rank, and do not give the "
                "optimizer to the framework's save. docs/howto/frameworks.md has a hook for each framework."
            )
        frame = frame.f_back


_METHOD = "resize_token_embeddings"


def refuse_resizing(model: nn.Module) -> None:
    """Make ``resize_token_embeddings(n)`` of a Transformers model raise. Not collective.

    It computes with this rank's shards, and registers whole weights, whose gradients no rank reduces.

    Args:
        model: The sharded root; without such a method nothing is done.
    """
    original = getattr(model, _METHOD, None)
    if not callable(original):
        return

    @functools.wraps(original)
    def resize(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None:  # asks for the embeddings
            return original(new_num_tokens, *args, **kwargs)
        raise ShardStateError(
            f"{_METHOD}({new_num_tokens}) was called on a sharded {type(model).__name__}, whose embeddings are "
            "divided over ranks. Call it before mmfsdp.shard(), then shard the model and build the optimizer."
        )

    setattr(model, _METHOD, resize)


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
