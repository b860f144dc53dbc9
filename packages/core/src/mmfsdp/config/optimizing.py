"""The settings of the optimizers that a plan chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Patterns

if TYPE_CHECKING:
    from mmfsdp.config.written import AdamWSettings, OptimizerSettings

__all__ = ["AdamWConfig", "OptimizerConfig"]

Momentum = Annotated[float, Field(ge=0, lt=1)]


def _auto_or_patterns(value: Any) -> Any:
    if value is None or value == "auto" or isinstance(value, str | list | tuple):
        return value
    raise ValueError(f"expected 'auto', a pattern or a list of patterns, got {value!r} (type {type(value).__name__}).")


class AdamWConfig(ConfigModel):
    """Section ``optimizer.adamw``: ``torch.optim.AdamW`` for all parameters that Muon does not update."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[AdamWSettings]) -> None: ...

    lr: NonNegativeFloat = 1e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-2


class OptimizerConfig(ConfigModel):
    """Section ``optimizer``: Muon updates the matrices of hidden layers, AdamW all other parameters.

    ``lr`` to ``adjust_lr_fn`` have the names and defaults of ``torch.optim.Muon``.
    """

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[OptimizerSettings]) -> None: ...

    muon: Annotated[
        Literal["auto"] | Patterns | None,
        BeforeValidator(_auto_or_patterns, json_schema_input_type=str | list[str] | None),
    ] = "auto"
    """``auto``: weights of hidden linear layers, convolutions, attention and experts. Patterns of parameters' FQNs
    select others; ``null`` none."""
    exclude: Patterns = ()
    """FQN patterns of parameters that AdamW updates though ``muon`` selects them."""
    fused: Mapping[str, PositiveInt] = Field(default_factory=dict)
    """By FQN pattern, how many matrices lie one below the other in a parameter, such as 3 for q, k and v."""
    stacked: Patterns = ()
    """FQN patterns of parameters whose first dimension counts matrices, such as the weights of experts."""
    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.1
    momentum: Momentum = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: PositiveFloat = 1e-7
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """``original`` (also ``null``) multiplies the rate by sqrt(max(1, rows / columns)), ``match_rms_adamw`` by 0.2
    sqrt(max(rows, columns)), with which AdamW's learning rates fit."""
    bucket_mib: PositiveInt = 256
    """MiB of the matrices that travel together; a larger parameter travels alone."""
    adamw: AdamWConfig = Field(default_factory=AdamWConfig)
