"""Builds models without the memory and the initial values of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.model import BaseModule

from mmfsdp import parameters_on_meta

__all__ = ["without_weights"]


@contextmanager
def without_weights() -> Iterator[None]:
    """Put the parameters of modules that are built in this context on the meta device, and do not initialise them.

    Constructors may call ``init_weights()`` of a part, as mmpretrain's LoRA model does. It would compute with values
    that the parameters do not have; in this context it does nothing.
    """
    replaced: dict[type, Callable[..., Any]] = {}

    def postponed(module: BaseModule, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the parameters have no values."""

    def init(module: BaseModule, *args: Any, **kwargs: Any) -> None:
        # Packages import their modules while a model is built: a class is known once it has an instance.
        for cls in type(module).__mro__:
            if "init_weights" in vars(cls) and cls not in replaced:
                replaced[cls] = vars(cls)["init_weights"]
                cls.init_weights = postponed  # type: ignore[attr-defined]
        stock(module, *args, **kwargs)

    stock = BaseModule.__init__
    BaseModule.__init__ = init
    try:
        with parameters_on_meta():
            yield
    finally:
        BaseModule.__init__ = stock
        for cls, method in replaced.items():
            cls.init_weights = method  # type: ignore[attr-defined]
