"""Types of settings that accept several spellings: dtypes, strategies, references, patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, PlainSerializer

from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.basics.references import check_reference
from mmfsdp.basics.text import compile_pattern
from mmfsdp.errors import MmfsdpError

__all__ = ["Dtype", "Names", "Pattern", "Patterns", "Reference", "Strategy", "as_mapping"]

T = TypeVar("T")


def _checked(check: Callable[[Any], T]) -> BeforeValidator:
    """Return a validator whose error text reaches the user unchanged."""

    def validate(value: Any) -> T | None:
        if value is None:  # for fields that may be None; other fields reject it themselves
            return None
        try:
            return check(value)
        except MmfsdpError as error:
            raise ValueError(error.message) from None

    return BeforeValidator(validate)


def _floating_dtype(value: Any) -> str:
    name = canonical_dtype(value)
    if not is_floating_point(name):
        raise ValueError(f"{value!r} is not a floating point dtype.")
    return name


def _strategy(value: Any) -> Any:
    # torch's enum is accepted without importing torch: its members have a name.
    name = getattr(value, "name", value)
    if not isinstance(name, str):
        return name
    upper = re.sub(r"[-\s]", "_", name.strip().upper().rpartition(".")[2])
    return "_HYBRID_SHARD_ZERO2" if upper == "HYBRID_SHARD_ZERO2" else upper


def _pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a non-empty pattern, got {value!r} (type {type(value).__name__}).")
    compile_pattern(value)
    return value


def _names(value: Any) -> Any:
    if isinstance(value, (str, type)):
        return (_class_name(value),)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(_class_name, value), key=str))
    if isinstance(value, (list, tuple)):
        return tuple(map(_class_name, value))
    raise ValueError(f"expected a name or a list of names, got {value!r} (type {type(value).__name__}).")


def _class_name(value: Any) -> Any:
    """Replace a class by its name: ``nn.Linear`` becomes ``'torch.nn.modules.linear:Linear'``."""
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def as_mapping(key: str, *scalars: type, schema: Any) -> BeforeValidator:
    """Return a validator that reads a bare value of the given types as ``{key: value}``.

    Args:
        key: The setting that a bare value stands for.
        *scalars: Types of bare values.
        schema: What is accepted, for the JSON schema.
    """

    def validate(value: Any) -> Any:
        if isinstance(value, scalars):
            return {key: value}
        if value is None or isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
            return value
        kinds = " or ".join(scalar.__name__ for scalar in scalars)
        raise ValueError(f"expected a {kinds} ({key}) or a mapping, got {value!r} (type {type(value).__name__}).")

    return BeforeValidator(validate, json_schema_input_type=schema)


Dtype = Annotated[str, _checked(_floating_dtype)]
"""A floating point dtype in any spelling, kept as its canonical name such as ``'bfloat16'``."""

Strategy = Annotated[
    Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    BeforeValidator(_strategy),
]
"""A sharding strategy by the name that torch's FSDP1 gave it; any case, or torch's enum member."""

Reference = Annotated[str, _checked(check_reference)]
"""``'package.module:attribute'``."""

Pattern = Annotated[str, _checked(_pattern)]
"""A glob on an FQN (``*`` within one dotted part, ``**`` across parts), or ``'re:...'``, a full-match regex."""

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_names, json_schema_input_type=str | list[str]),
    PlainSerializer(list, return_type=list[str]),
]
"""One name or a list of names; a class stands for its name."""

Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_names, json_schema_input_type=str | list[str])]
"""One pattern or a list of patterns."""
