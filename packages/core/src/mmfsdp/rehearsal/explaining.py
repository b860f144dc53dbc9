"""Says of a step that failed which module and which line of the user's code it was, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn

from mmfsdp.errors import MmfsdpError, RehearsalError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.fake import CANNOT_BE_FAKED
from mmfsdp.rehearsal.recording.phases import Places

__all__ = ["explained"]

_OWN = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_NEEDS_VALUES = (".numpy() is not supported for tensor subclasses", "passed to FakeTensor.__format__")
"""Messages of torch and Python where a tensor without values becomes an array or text."""
_DTYPES = ("dtype", "scalar type", "bias type")
"""Phrases in torch's messages about operators whose inputs have different dtypes."""
_SHARDS = ("DTensor", "Sharding propagation failed", "sharding strategy")
"""Phrases in torch's messages about operators that have no rule for sharded tensors."""


@contextmanager
def explained(places: Places, plan: ShardPlan, model: nn.Module) -> Iterator[None]:
    """Raise what a step raises as a RehearsalError that names the module and the line."""
    try:
        yield
    except MmfsdpError:
        raise
    except Exception as error:
        at = _user_line(error)
        where = f" at {at}" if at else ""
        fqn = places.failed or None
        if isinstance(error, CANNOT_BE_FAKED) or any(words in str(error) for words in _NEEDS_VALUES):
            raise RehearsalError(
                f"The step needs the values of a tensor{where}, and a rehearsal has none ({type(error).__name__}: "
                f"{error}). Say how many elements masks select there, as in assume=0.1 for a tenth; compute with "
                "tensors of fixed shapes; or give loss=(model, batch) -> tensor that goes around it. "
                "mmfsdp.planning.estimate_memory() computes all but activations.",
                fqn=fqn,
            ) from error
        hint = _about_buffers(plan, model) if any(words in str(error) for words in _DTYPES) else ""
        if places.phase == "optimizer":
            hint = _about_optimizers(error)
        raise RehearsalError(
            f"The step failed in {places.phase}{where}: {type(error).__name__}: {error}{hint}", fqn=fqn
        ) from error


def _about_buffers(plan: ShardPlan, model: nn.Module) -> str:
    """Return how to cast buffers, if they are what may have another dtype than the parameters that compute."""
    computing = plan.root.precision.param_dtype
    others = (name for name, buffer in model.named_buffers() if buffer.is_floating_point())
    if computing is None or plan.buffer_dtype is not None or (name := next(others, None)) is None:
        return ""
    return (
        f". Training also fails there. Parameters compute in {computing}, and floating point buffers such as {name!r} "
        f'keep their dtype; if they meet there, set precision.buffer_dtype to "{computing}".'
    )


def _about_optimizers(error: Exception) -> str:
    """Return how to train with an optimizer that cannot update shards, if this is one; real ranks fail there too."""
    if "closure" in str(error):
        return (
            ". A rehearsal calls optimizer.step() without a closure. Rehearse with an optimizer whose state is as "
            "large, such as SGD with momentum."
        )
    if not any(words in str(error) for words in _SHARDS):
        return ""
    return (
        "\nTraining also fails there: torch cannot run this optimizer on shards. Keep the parameters that it updates "
        'whole with sharding.ignored_parameters=["**"] (or only those of some modules, ["head.**"]), choose an '
        "optimizer that the page on optimizers lists, or train matrices with Muon (the setting optimizer), which "
        "computes them whole."
    )


def _user_line(error: BaseException) -> str:
    """Return file, line and code of the innermost frame outside of torch and this package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_relative_to(_OWN) and not path.is_relative_to(_TORCH) and path.is_file():
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return ""
