"""Averaged weights in a rehearsal: a copy of what the rank holds of the model, updated after the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.fakes.fake import cloned_by_deepcopy
from mmfsdp.state import LocalView

__all__ = ["Averages", "EmaFn"]

EmaFn = Callable[[nn.Module], Any]
"""``(model) -> averages``: from this rank's part of a model, as `mmfsdp.state.LocalView` shows it, to an object with
``update_parameters(model)``, such as ``torch.optim.swa_utils.AveragedModel``."""


class Averages:
    """The averages of a sharded model.

    Args:
        make: Makes them.
        model: The sharded model.

    Raises:
        ConfigError: What was made has no ``update_parameters``.
    """

    def __init__(self, make: EmaFn, model: nn.Module) -> None:
        self._view = LocalView(model)
        with cloned_by_deepcopy():
            self._made = make(self._view.tree())
        if not callable(getattr(self._made, "update_parameters", None)):
            raise ConfigError(
                f"ema returned {type(self._made).__name__}, which has no update_parameters(model). Give a function "
                "such as torch.optim.swa_utils.AveragedModel.",
                config="ema",
            )

    def update(self) -> None:
        """Update the averages, as a training loop does after each step."""
        self._made.update_parameters(self._view.tree())
