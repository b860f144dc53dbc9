"""The settings of tensor parallelism: which modules the axis `tensor` divides, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Unpack

from pydantic import BeforeValidator, PlainSerializer, WrapValidator

from mmfsdp.basics.text import compile_pattern
from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Accepted, one_of
from mmfsdp.errors import ConfigError, closest

if TYPE_CHECKING:
    from mmfsdp.config.written import ParallelRuleSettings

__all__ = ["LAYOUTS", "Parallel", "ParallelRule"]

Layout: TypeAlias = Literal["replicate", "sequence", "heads", "features"]

_STYLES = ("colwise", "rowwise", "sequence", "replicate", "experts")
_WORDS = ("replicate", "sequence", "heads", "features")
_Style = Annotated[Literal["colwise", "rowwise", "sequence", "replicate", "experts"], BeforeValidator(one_of(*_STYLES))]
_Layout = Annotated[Layout, BeforeValidator(one_of(*_WORDS))]

LAYOUTS: Mapping[str, tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {
    "colwise": (("replicate", "sequence"), ("features", "replicate")),
    "rowwise": (("features", "replicate"), ("replicate", "sequence")),
    "sequence": (("sequence", "heads"), ("sequence", "heads")),
    "replicate": ((), ()),
    "experts": ((), ()),
}
"""By style, the layouts that the input may have, and those that the output may have; the first one is the default."""


class ParallelRule(ConfigModel):
    """A rule of section ``parallel``: how the axis ``tensor`` divides the modules that a pattern names."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ParallelRuleSettings]) -> None: ...

    style: _Style
    """``colwise``: divide what the outputs of a linear layer come from, or the features of an embedding. ``rowwise``:
    what its inputs meet, or the vocabulary of an embedding. ``sequence``: keep a norm whole, which sees a part of the
    sequence or of the heads, and sum its gradients. ``replicate``: keep the module whole. ``experts``: divide stacked
    experts along the axis ``expert``; see `divide_experts`."""
    input: _Layout | None = None
    """Layout of the input along ``tensor``: ``replicate``, ``sequence`` (dimension 1 is divided), ``heads`` (dimension
    2) or ``features`` (the last one). Default: ``replicate`` for ``colwise`` and embeddings, ``features`` for
    ``rowwise``, ``sequence`` for ``sequence``."""
    output: _Layout | None = None
    """Layout of the output. Default: ``features`` for ``colwise``, ``replicate`` for ``rowwise``, that of the input for
    ``sequence``."""
    head_by_head: bool = False
    """Whether a ``colwise`` matrix of queries, keys and values has those of one head side by side, as GPT-NeoX's has.
    One that has all queries first cannot be divided by a rule."""

    def check_together(self) -> None:
        """Raise for layouts that the style does not have.

        Raises:
            ValueError: It has not; validation turns it into a `ConfigError`.
        """
        given_of = {"input": self.input, "output": self.output}
        for (what, given), accepted in zip(given_of.items(), LAYOUTS[self.style], strict=True):
            if given is not None and given not in accepted:
                raise ValueError(
                    f"{what}={given!r} is no layout of style {self.style!r}. "
                    + (f"Accepted: {', '.join(map(repr, accepted))}." if accepted else f"Leave {what} out.")
                )
        if self.style == "sequence" and self.output not in (None, self.input or "sequence"):
            raise ValueError(
                f"style 'sequence' keeps the layout of its input, {self.input or 'sequence'!r}. Leave output out."
            )
        if self.head_by_head and self.style != "colwise":
            raise ValueError(f"head_by_head is said of 'colwise' matrices, not of {self.style!r}. Leave it out.")

    @property
    def axis(self) -> str:
        """The axis along which the style divides."""
        return "expert" if self.style == "experts" else "tensor"

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """The layouts of input and output with their defaults; None where the module decides."""
        inputs, outputs = LAYOUTS[self.style]
        first = self.input or (inputs[0] if inputs else None)
        if self.style == "sequence":
            return first, first
        return first, self.output or (outputs[0] if outputs else None)


def _read(value: Any, handler: Any) -> Any:
    """Return ``'auto'`` as it is, and rules by pattern; a bare style is a rule."""
    if value is None:
        return None
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return "auto"
        words = closest(value, ("auto",))
        raise ValueError(f"{value!r} is not accepted.{words} Write 'auto', or rules such as {{'*.fc1': 'colwise'}}.")
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            "expected 'auto' or a mapping from patterns of modules to styles, such as {'*.fc1': 'colwise'}, got "
            f"{value!r} (type {type(value).__name__})."
        )
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"expected a non-empty pattern, got {pattern!r} (type {type(pattern).__name__}).")
        try:
            compile_pattern(pattern)
        except ConfigError as error:
            raise ValueError(error.message) from None
    return handler({pattern: {"style": rule} if isinstance(rule, str) else rule for pattern, rule in value.items()})


def _written(value: Any) -> Any:
    """Return plain data; a rule that says no more than its style is a word."""
    if value is None or isinstance(value, str):
        return value
    rules = {pattern: rule.model_dump(mode="json", exclude_defaults=True) for pattern, rule in value.items()}
    return {pattern: rule["style"] if len(rule) == 1 else rule for pattern, rule in rules.items()}


if TYPE_CHECKING:
    Parallel: TypeAlias = Mapping[str, ParallelRule] | Literal["auto"] | None
else:
    Parallel = Annotated[
        dict[str, ParallelRule] | None,
        WrapValidator(_read, json_schema_input_type=dict[str, ParallelRule | _Style] | Literal["auto"] | None),
        PlainSerializer(_written),
        Accepted('Mapping[str, ParallelRule | Mapping[str, Any] | str] | Literal["auto"] | None'),
    ]
"""Type of the section ``parallel``: rules by pattern of module names, or ``'auto'``."""
