"""The settings of compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from mmfsdp.config.base import ConfigModel

__all__ = ["Compile", "CompileConfig"]


class CompileConfig(ConfigModel):
    """Section ``compile``: each shard unit below the root is compiled in place, as ``module.compile()`` does."""

    fullgraph: bool = False
    """Raise where torch cannot compile a unit into one graph, instead of running that part eagerly."""
    backend: str = "inductor"
    """A name of ``torch.compiler.list_backends()``, or a reference ``'package.module:function'``."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """The goal of the backend ``inductor``, as in `torch.compile`."""
    dynamic: bool | None = None
    """Whether shapes are dynamic; ``null``: where they have changed."""
    root: bool = False
    """Compile the root as well. Its graph ends at each unit, so ``fullgraph`` needs a model without other units."""


def _read(value: Any) -> Any:
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
        return value
    raise ValueError(f"expected true, false or a mapping, got {value!r} (type {type(value).__name__}).")


Compile = Annotated[CompileConfig | None, BeforeValidator(_read, json_schema_input_type=CompileConfig | bool | None)]
