"""Says what to call instead of ``save_pretrained()`` of transformers, diffusers and peft, which would write shards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.errors import UnsupportedCallError

__all__ = ["guard_save_pretrained"]


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
