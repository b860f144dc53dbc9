"""Tracks weights that a checkpoint must provide, and raises if training starts without them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.errors import ShardStateError, StateDictError

__all__ = ["PendingWeights"]


class PendingWeights:
    """The parameters of a model that are on the meta device because of ``skip_init_weights``.

    Args:
        model: The model, not sharded yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, param in model.named_parameters() if param.is_meta}
        self._guard: Any = None

    def allocate(self, module: nn.Module) -> None:
        """Fill a module's own parameters with zeros, which the checkpoint replaces."""
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.zero_()

    def guard(self, wrapper: nn.Module) -> None:
        """Make forwards of ``wrapper`` raise until `loaded` is called."""
        if self._names and self._guard is None:
            self._guard = wrapper.register_forward_pre_hook(self._refuse, prepend=True)

    def loaded(self, missing: Iterable[str]) -> None:
        """Record that weights were loaded.

        Args:
            missing: FQNs that the checkpoint lacks.

        Raises:
            StateDictError: Parameters without values are missing.
        """
        without = sorted(self._names.intersection(missing))
        if without:
            raise StateDictError(
                f"With skip_init_weights=True the checkpoint must provide all weights, but it lacks {len(without)} of "
                f"them: {', '.join(without[:5])}. Load one that has them, or set skip_init_weights=False."
            )
        self._names = set()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise ShardStateError(
            "With skip_init_weights=True the model has no weights until a checkpoint is loaded. Set load_from or "
            "resume to a checkpoint, or set skip_init_weights=False."
        )
