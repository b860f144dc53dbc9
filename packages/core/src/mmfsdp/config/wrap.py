"""The declarative wrapping policies, which select the modules that become shard units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import BeforeValidator, Field, JsonValue, PositiveInt

from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Accepted, Names, Patterns, Reference

if TYPE_CHECKING:
    from mmfsdp.config.written import (
        AllOfSettings,
        AnyOfSettings,
        ModuleClassWrapSettings,
        ModuleNameWrapSettings,
        ReferenceWrapSettings,
        SizeWrapSettings,
    )

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
    """Policy ``auto``: repeated or declared blocks of the model become units; so do large embeddings and heads."""

    kind: Literal["auto"] = "auto"


class NoWrap(ConfigModel):
    """Policy ``none``: the whole model is one shard unit: fewest communication calls, most memory."""

    kind: Literal["none"] = "none"


class SizeWrap(ConfigModel):
    """Policy ``size``: bottom-up, a module becomes a unit once it holds enough parameters that no unit below it has.

    It follows the rule of ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.
    """

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[SizeWrapSettings]) -> None: ...

    kind: Literal["size"] = "size"
    min_num_params: PositiveInt = 100_000_000
    """Parameters (elements) that a module must hold outside of units below it."""
    exclude_classes: Names | None = None
    """Classes that never become a unit. Torch's default: ``ModuleList``, ``ModuleDict``."""
    force_leaf_classes: Names | None = None
    """Classes that are not searched inside. Torch's default: ``MultiheadAttention``."""


class ModuleClassWrap(ConfigModel):
    """Policy ``module_class``: every instance of the named classes becomes a unit, subclasses included."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ModuleClassWrapSettings]) -> None: ...

    kind: Literal["module_class"] = "module_class"
    classes: Names = Field(min_length=1)
    """``'Block'``, ``'my.models.Block'``, ``'my.models:Block'``, or the class itself, which is kept as its name."""


class ModuleNameWrap(ConfigModel):
    """Policy ``module_name``: every module whose FQN matches becomes a unit."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ModuleNameWrapSettings]) -> None: ...

    kind: Literal["module_name"] = "module_name"
    patterns: Patterns = Field(min_length=1)
    """Globs such as ``'blocks.*'`` (``*`` within one part, ``**`` across parts) or ``'re:blocks\\.\\d+'``."""


class ReferenceWrap(ConfigModel):
    """Policy ``reference``: a function, given by its import path, with any signature that torch accepts."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ReferenceWrapSettings]) -> None: ...

    kind: Literal["reference", "lambda"] = "reference"
    target: Reference
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments bound to the callable, as ``functools.partial`` would."""


class AnyOf(ConfigModel):
    """Policy ``any_of``: a module becomes a unit if any of the policies selects it."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[AnyOfSettings]) -> None: ...

    kind: Literal["any_of"] = "any_of"
    policies: tuple[Wrap, ...] = Field(min_length=1)


class AllOf(ConfigModel):
    """Policy ``all_of``: a module becomes a unit if all of the policies select it."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[AllOfSettings]) -> None: ...

    kind: Literal["all_of"] = "all_of"
    policies: tuple[Wrap, ...] = Field(min_length=1)


_Kinds = Annotated[
    AutoWrap | NoWrap | SizeWrap | ModuleClassWrap | ModuleNameWrap | ReferenceWrap | AnyOf | AllOf,
    Field(discriminator="kind"),
]
_OF_ACCELERATE = {"TRANSFORMER_BASED_WRAP": "auto", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_KINDS = ("auto", "none", "size", "module_class", "module_name", "reference", "lambda", "any_of", "all_of")


def _shorthand(value: Any) -> Any:
    """Read a bare kind, or class names."""
    if value is None:
        return {"kind": "none"}
    if isinstance(value, str) and (kind := value.strip().lower()) in _KINDS:
        return {"kind": kind}
    if isinstance(value, str) and (known := _OF_ACCELERATE.get(value.strip().upper())) is not None:
        raise ValueError(f"{value!r} is a policy of accelerate. Write {known!r}, or the names of the classes to wrap.")
    if isinstance(value, str | type | list | tuple | set | frozenset):
        return {"kind": "module_class", "classes": value}
    if isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
        return value
    objects = " Pass functions and policies of torch as the argument policy instead." if callable(value) else ""
    raise ValueError(
        "expected 'auto', 'none', 'size', the name of a class, a list of names or a mapping with a 'kind', got "
        f"{value!r} (type {type(value).__name__}).{objects}"
    )


Wrap = Annotated[
    _Kinds,
    BeforeValidator(_shorthand, json_schema_input_type=_Kinds | str | list[str] | None),
    Accepted("AnyWrap"),
]
"""Type of the section ``wrap``: any of these policies."""
"""Any of the policies above, told apart by ``kind``. A bare kind stands for the policy with its defaults: ``'auto'``,
``'none'``, ``'size'``; another word is the name of a class, and a list has several; None is `NoWrap`."""

AnyOf.model_rebuild()
AllOf.model_rebuild()
