"""The declarative wrapping policies, which select the modules that become shard units."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, PositiveInt

from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Names, Patterns, Reference

__all__ = [
    "AllOf",
    "AnyOf",
    "AutoWrap",
    "ModuleClassWrap",
    "ModuleNameWrap",
    "NoWrap",
    "ReferenceWrap",
    "SizeWrap",
    "Wrap",
]


class AutoWrap(ConfigModel):
    """Repeated blocks, or blocks that the model declares, become units; so do large embeddings and heads."""

    kind: Literal["auto"] = "auto"


class NoWrap(ConfigModel):
    """The whole model is one shard unit: fewest communication calls, most memory."""

    kind: Literal["none"] = "none"


class SizeWrap(ConfigModel):
    """Bottom-up, a module becomes a unit once it holds enough parameters that no unit below it has.

    The rule is that of ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.
    """

    kind: Literal["size"] = "size"
    min_num_params: PositiveInt = 100_000_000
    """Parameters (elements) that a module must hold outside of units below it."""
    exclude_classes: Names | None = None
    """Classes that never become a unit. Torch's default: ``ModuleList``, ``ModuleDict``."""
    force_leaf_classes: Names | None = None
    """Classes that are not searched inside. Torch's default: ``MultiheadAttention``."""


class ModuleClassWrap(ConfigModel):
    """Every instance of the named classes becomes a unit, subclasses included."""

    kind: Literal["module_class"] = "module_class"
    classes: Names = Field(min_length=1)
    """``'Block'``, ``'my.models.Block'``, ``'my.models:Block'``, or the class itself, which is kept as its name."""


class ModuleNameWrap(ConfigModel):
    """Every module whose FQN matches becomes a unit."""

    kind: Literal["module_name"] = "module_name"
    patterns: Patterns = Field(min_length=1)
    """Globs such as ``'blocks.*'`` (``*`` within one part, ``**`` across parts) or ``'re:blocks\\.\\d+'``."""


class ReferenceWrap(ConfigModel):
    """A policy function, given by its import path, with any signature that a version of torch accepts."""

    kind: Literal["reference", "lambda"] = "reference"
    target: Reference
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments bound to the callable, as ``functools.partial`` would."""


class AnyOf(ConfigModel):
    """A module becomes a unit if any of the policies selects it."""

    kind: Literal["any_of"] = "any_of"
    policies: tuple[Wrap, ...] = Field(min_length=1)


class AllOf(ConfigModel):
    """A module becomes a unit if all of the policies select it."""

    kind: Literal["all_of"] = "all_of"
    policies: tuple[Wrap, ...] = Field(min_length=1)


def _shorthand(value: Any) -> Any:
    if value is None:
        return {"kind": "none"}
    return {"kind": value.strip().lower()} if isinstance(value, str) else value


_Kinds = Annotated[
    AutoWrap | NoWrap | SizeWrap | ModuleClassWrap | ModuleNameWrap | ReferenceWrap | AnyOf | AllOf,
    Field(discriminator="kind"),
]


Wrap = Annotated[
    _Kinds, BeforeValidator(_shorthand, json_schema_input_type=_Kinds | Literal["auto", "none", "size"] | None)
]
"""Any of the policies above, told apart by ``kind``. A bare kind stands for the policy with its defaults: ``'auto'``,
``'none'``, ``'size'``; None is `NoWrap`."""

AnyOf.model_rebuild()
AllOf.model_rebuild()
