"""The settings of mixed precision: dtypes of parameters, gradients, buffers and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import BeforeValidator, Field, model_validator

from mmfsdp.basics.dtypes import canonical_dtype, is_floating_point
from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Accepted, Dtype, Names, as_mapping, one_of
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    from mmfsdp.config.written import PrecisionOverrideSettings, PrecisionSettings

__all__ = ["PRESETS", "Precision", "PrecisionConfig", "PrecisionOverride"]

PRESETS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "fp16": {"param_dtype": "float16", "reduce_dtype": "float32"},
    "bf16-pure": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "storage_dtype": "bfloat16"},
}

_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _preset_name(text: str) -> str:
    with contextlib.suppress(ConfigError):
        return _OF_DTYPE.get(canonical_dtype(text), text)
    return text.lower()


def _is_bare(value: Any) -> bool:
    return isinstance(value, str) or _is_torch_dtype(value)


def _is_torch_dtype(value: Any) -> bool:
    return f"{type(value).__module__}.{type(value).__qualname__}" == "torch.dtype"  # without importing torch


_preset_word = one_of(*PRESETS, spelling=_preset_name)


def _read_preset(value: Any) -> str:
    """Return the preset that a name, a dtype's name or a ``torch.dtype`` stands for."""
    return _preset_word(str(value) if _is_torch_dtype(value) else value)


_Preset = Annotated[
    Literal["fp32", "bf16", "fp16", "bf16-pure"], BeforeValidator(_read_preset), Accepted("torch.dtype | str")
]


class PrecisionOverride(ConfigModel):
    """An entry of ``precision.overrides``: dtypes of the shard units whose module matches, in place of the others."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[PrecisionOverrideSettings]) -> None: ...

    modules: Names = Field(min_length=1)
    """Class names or FQN patterns. A match becomes a shard unit of its own if it is none yet; in place of a container
    without ``forward``, its children do."""
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    cast_forward_inputs: bool = True


class PrecisionConfig(ConfigModel):
    """Section ``precision``: the dtypes of mixed precision, or a bare preset name, as in ``precision: bf16``."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[PrecisionSettings]) -> None: ...

    preset: _Preset = "fp32"
    """Starting point; a field given beside it wins. A dtype stands for the preset of its name. ``fp16`` needs a
    gradient scaler."""
    param_dtype: Dtype | None = None
    """Dtype of gathered parameters, forward and backward. Shards and optimizer keep the model's dtype."""
    reduce_dtype: Dtype | None = None
    """Dtype of gradient reduction. Default: ``param_dtype``, in every version of torch."""
    buffer_dtype: Dtype | None = None
    """Floating point buffers are cast to it once, when the plan is applied."""
    output_dtype: Dtype | None = None
    """Floating point outputs of the whole model are cast to it."""
    storage_dtype: Dtype | None = None
    """Dtype of the shards and the optimizer states. Default: the model's dtype."""
    cast_forward_inputs: bool = True
    """Cast floating point inputs of each unit to its ``param_dtype``."""
    cast_root_forward_inputs: bool | None = None
    """The same for the inputs of the whole model. Default: the value of ``cast_forward_inputs``."""
    keep_low_precision_grads: bool = False
    """Keep gradients in ``reduce_dtype`` after backward. Only the ``fsdp1`` engine can."""
    ignore_classes: Names = ("torch.nn.modules.batchnorm._BatchNorm",)
    """Classes that stay in full precision, each instance a shard unit of its own (torch's default: batch norm)."""
    overrides: tuple[PrecisionOverride, ...] = ()
    """Dtypes of chosen modules."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        preset: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # of a wrong preset: the field reports it
            preset = PRESETS[_read_preset(given.get("preset", "fp32"))]
        filled = {**preset, **given}
        if "param_dtype" in filled and "reduce_dtype" not in filled:
            # Report a wrong dtype once, for the field that the user wrote.
            with contextlib.suppress(ConfigError):
                if is_floating_point(filled["param_dtype"]):
                    filled["reduce_dtype"] = filled["param_dtype"]
        return filled

    @property
    def is_mixed(self) -> bool:
        """Whether any dtype differs from the model's own."""
        return any((self.param_dtype, self.reduce_dtype, self.buffer_dtype, self.overrides))


Precision = Annotated[
    PrecisionConfig,
    as_mapping(
        "preset",
        _read_preset,
        _is_bare,
        expected="a preset, a dtype",
        schema=PrecisionConfig | _Preset,
    ),
]
