"""Types of settings that accept several spellings: dtypes, strategies, references, patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, PlainSerializer

from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.basics.references import check_reference
from mmfsdp.basics.text import compile_pattern
from mmfsdp.errors import MmfsdpError, closest

__all__ = [
    "Accepted",
    "Dtype",
    "Names",
    "Pattern",
    "Patterns",
    "Reference",
    "Strategy",
    "as_mapping",
    "is_word",
    "one_of",
    "read_strategy",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Accepted:
    """What users may write for a type of settings, for type checkers: ``python tools/settings_types.py`` reads it."""

    types: str
    """A union, in which torch's classes may stand."""


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


def one_of(*words: str, spelling: Callable[[str], str] = str.lower) -> Callable[[Any], str]:
    """Return a function that returns the word that a value stands for, and rejects others as they were written.

    Args:
        *words: The accepted words.
        spelling: Turns the given value, a string or the name of an enum member, into an accepted word.
    """

    def read(value: Any) -> str:
        name = value.name if isinstance(value, Enum) else value
        if isinstance(name, str) and (word := spelling(name.strip())) in words:
            return word
        accepted = ", ".join(map(repr, words))
        raise ValueError(f"{value!r} is not accepted.{closest(value, words)} Accepted: {accepted}.")

    return read


def is_word(value: Any) -> bool:
    """Tell whether a value is a string or a member of an enum."""
    return isinstance(value, str | Enum)


def _strategy_name(text: str) -> str:
    upper = re.sub(r"[-\s]", "_", text.upper().rpartition(".")[2])
    return "_HYBRID_SHARD_ZERO2" if upper == "HYBRID_SHARD_ZERO2" else upper


read_strategy = one_of(
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", spelling=_strategy_name
)


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


def as_mapping(
    key: str, read: Callable[[Any], Any], is_bare: Callable[[Any], bool], *, expected: str, schema: Any
) -> BeforeValidator:
    """Return a validator that reads a bare value as ``{key: value}``.

    Args:
        key: The setting that a bare value stands for.
        read: Returns the setting's value for a bare one, or raises ValueError.
        is_bare: Tells whether a value has the type of a bare one.
        expected: What a bare value is, for the error.
        schema: What is accepted, for the JSON schema.
    """

    def validate(value: Any) -> Any:
        if is_bare(value):
            return {key: read(value)}
        if value is None or isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
            return value
        raise ValueError(f"expected {expected} or a mapping, got {value!r} (type {type(value).__name__}).")

    return BeforeValidator(validate, json_schema_input_type=schema)


Dtype = Annotated[str, _checked(_floating_dtype), Accepted("torch.dtype | str")]
"""A floating point dtype in any spelling, kept as its canonical name such as ``'bfloat16'``."""

Strategy = Annotated[
    Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    BeforeValidator(read_strategy),
    Accepted("ShardingStrategy | str"),
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
    Accepted("AnyNames"),
]
"""One name or a list of names; a class stands for its name."""

Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_names, json_schema_input_type=str | list[str])]
"""One pattern or a list of patterns."""
