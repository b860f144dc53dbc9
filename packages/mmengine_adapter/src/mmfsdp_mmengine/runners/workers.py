"""Lets the workers of the data loaders that a runner builds outlive signals that ask ranks to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

import mmfsdp

__all__ = ["with_patient_workers"]


def with_patient_workers(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds data loaders with workers as `mmfsdp.patient_workers` makes them.

    Args:
        build: Builds a data loader.
    """

    def build_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if isinstance(loader, DataLoader):
            mmfsdp.patient_workers(loader)
        return loader

    return build_dataloader
