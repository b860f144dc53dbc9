"""Says how many tensors and scalars each optimizer of torch keeps per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.errors import ConfigError, closest

__all__ = ["OPTIMIZERS", "SCALAR_BYTES", "optimizer_named", "optimizer_tensors"]

OPTIMIZERS: dict[str, tuple[int, int]] = {
    "adadelta": (2, 1),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adam-amsgrad": (3, 1),
    "adamax": (2, 1),
    "adamw": (2, 1),
    "adamw-amsgrad": (3, 1),
    "asgd": (1, 3),
    "nadam": (2, 2),
    "radam": (2, 1),
    "rmsprop": (1, 1),
    "rmsprop-centered": (2, 1),
    "rmsprop-momentum": (2, 1),
    "rmsprop-momentum-centered": (3, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),
}
"""For each optimizer of ``torch.optim`` that can step shards of any shape: the tensors that it keeps per parameter,
of the parameter's shape and stored dtype, and its float32 scalars per parameter, such as ``step``."""

SCALAR_BYTES = itemsize("float32")
"""Bytes of one such scalar."""


def optimizer_named(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return the name in `OPTIMIZERS` of a class with these arguments, such as ``'sgd-momentum'``, or None.

    Args:
        name: The class's name, in any case.
        settings: Its arguments; only those that change how much it keeps matter.
    """
    options = [option for option in ("momentum", "amsgrad", "centered") if settings.get(option)]
    spelt = "-".join([name.lower(), *options])
    return spelt if spelt in OPTIMIZERS else None


def optimizer_tensors(optimizer: str | int | None) -> tuple[str | int | None, int, int]:
    """Return the optimizer's name, and its tensors and scalars per parameter.

    Args:
        optimizer: One of `OPTIMIZERS` in any case, a number of tensors per parameter, or None if unknown.

    Raises:
        ConfigError: There is no such optimizer.
    """
    if optimizer is None:
        return None, 0, 0
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer, optimizer, 0
    name = str(optimizer).lower()
    if name not in OPTIMIZERS:
        hint = closest(name, OPTIMIZERS) or f" Known: {', '.join(OPTIMIZERS)}."
        raise ConfigError(
            f"{optimizer!r} is not a known optimizer.{hint} For other optimizers, give the number of tensors that they "
            "keep per parameter.",
            config="optimizer",
        )
    return name, *OPTIMIZERS[name]
