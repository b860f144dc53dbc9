"""The one form that wrapping policies of all kinds are brought into, and its combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

__all__ = ["Verdicts", "all_of", "any_of", "by_class"]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A policy in one form: whether to look inside a module, and whether, why and with which settings to wrap it.

    ``inside(module, numel)`` and ``wrap(module, numel)`` get the parameters (elements) below the module that no
    chosen module below it holds. ``wrap`` gives None, a reason, or a reason with settings.
    """

    inside: Callable[[nn.Module, int], bool]
    wrap: Callable[[nn.Module, int], str | tuple[str, Mapping[str, Any]] | None]


def by_class(classes: Mapping[type, str]) -> Verdicts:
    """Choose the instances of these classes, each with the reason given for its class."""
    return Verdicts(inside=lambda module, numel: True, wrap=lambda module, numel: classes.get(type(module)))


def any_of(parts: list[Verdicts]) -> Verdicts:
    """Choose what any part chooses, for the reason of the first part that does."""

    def wrap(module: nn.Module, numel: int) -> str | tuple[str, Mapping[str, Any]] | None:
        answers = (part.wrap(module, numel) for part in parts)
        return next((answer for answer in answers if answer is not None), None)

    return Verdicts(lambda module, numel: any(part.inside(module, numel) for part in parts), wrap)


def all_of(parts: list[Verdicts]) -> Verdicts:
    """Choose what every part chooses, for the reasons of all of them."""

    def wrap(module: nn.Module, numel: int) -> str | None:
        answers = [part.wrap(module, numel) for part in parts]
        reasons = [answer[0] if isinstance(answer, tuple) else answer for answer in answers if answer is not None]
        return " and ".join(reasons) if len(reasons) == len(parts) else None

    return Verdicts(lambda module, numel: all(part.inside(module, numel) for part in parts), wrap)
