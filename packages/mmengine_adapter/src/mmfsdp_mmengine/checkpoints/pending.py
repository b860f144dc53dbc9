"""Weights that a checkpoint has yet to bring: allocated without values, and never trained before they have any."""

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
        """Give a module's own parameters some value; the checkpoint's replaces it."""
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.zero_()

    def guard(self, wrapper: nn.Module) -> None:
        """Refuse forwards of ``wrapper`` until `loaded` was called."""
        if self._names and self._guard is None:
            self._guard = wrapper.register_forward_pre_hook(self._refuse, prepend=True)

    def loaded(self, missing: Iterable[str]) -> None:
        """Note that weights were loaded.

        Args:
            missing: FQNs that they left out.

        Raises:
            StateDictError: Some of these have no value.
        """
        without = sorted(self._names.intersection(missing))
        if without:
            raise StateDictError(
                f"skip_init_weights leaves all weights to the checkpoint, but it lacks {len(without)} of them: "
                f"{', '.join(without[:5])}. Load one that has them, or set skip_init_weights=False."
            )
        self._names = set()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise ShardStateError(
            "skip_init_weights left the model without weights and none were loaded. Set load_from or resume to a "
            "checkpoint, or skip_init_weights=False."
        )
