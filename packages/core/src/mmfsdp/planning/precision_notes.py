"""Notes on what mixed precision rounds: float inputs that need more digits, and weights that are low from the start."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch.nn as nn

from mmfsdp.config import PrecisionConfig
from mmfsdp.planning.plan_records import Note, ParamEntry, ShardUnit

__all__ = ["low_weights_notes", "rounded_input_notes"]

_LOW = {"float16", "bfloat16"}
_TIMES = {"timestep", "timesteps", "sigma", "sigmas"}
_TABLES = {"rotary_emb", "image_rotary_emb", "rotary_embs", "freqs", "freqs_cis", "freqs_cos", "freqs_sin"}


def low_weights_notes(params: Iterable[ParamEntry], config: PrecisionConfig) -> list[Note]:
    """Return a note if the optimizer will train weights of low precision although only the compute dtype was asked for.

    Args:
        params: All parameters, with the dtypes of their shards.
        config: The model-wide settings.
    """
    if config.param_dtype not in _LOW or config.storage_dtype is not None:
        return []
    low = [param.dtype for param in params if param.requires_grad and param.dtype in _LOW]
    if not low:
        return []
    return [
        Note(
            kind="dtype",
            text=f"the model's weights are {low[0]} before sharding, so the optimizer updates {low[0]} and keeps its "
            "states in it, and small updates are lost. Set precision.storage_dtype to 'float32', or load the "
            "model in float32.",
        )
    ]


def rounded_input_notes(model: nn.Module, units: Sequence[ShardUnit]) -> list[Note]:
    """Return notes on inputs that lose digits that matter if they are floats: timesteps, and tables of rotations.

    Args:
        model: The model.
        units: Its shard units, the root last.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for unit in units:
        dtype = unit.precision.param_dtype
        if dtype in _LOW and unit.precision.cast_forward_inputs:
            for name in _inputs(model.get_submodule(unit.fqn)) & (_TIMES | _TABLES):
                found.setdefault((name, str(dtype), "" if unit.is_root else unit.class_name), []).append(unit.fqn)
    notes = []
    for (name, dtype, class_name), fqns in sorted(found.items()):
        what = f"input {name!r}, if it is a float, is rounded to {dtype}" + (
            ", as 999.0 to 1000.0; integers are not. " if name in _TIMES and dtype == "bfloat16" else ". "
        )
        if class_name:
            settings = f"{{'modules': {class_name!r}, 'param_dtype': {dtype!r}, 'reduce_dtype': 'float32', "
            way = f"precision.overrides=[{settings}'cast_forward_inputs': False}}] leaves the inputs of these units as "
        else:
            way = "precision.cast_root_forward_inputs=False leaves the inputs of the whole model as "
        notes.append(
            Note(kind="precision", text=f"{what}{way}they are: cast those that need it yourself.", fqns=tuple(fqns))
        )
    return notes


def _inputs(module: nn.Module) -> set[str]:
    try:
        return {*inspect.signature(module.forward).parameters}
    except (TypeError, ValueError):  # a forward that is not written in Python
        return set()
