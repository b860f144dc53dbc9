"""Says of a step that failed which module and which line of the user's code it was, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from mmfsdp.basics.arguments import argument
from mmfsdp.errors import MmfsdpError, RehearsalError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.fakes.fake import CANNOT_BE_FAKED
from mmfsdp.rehearsal.recording.phases import StepPosition

__all__ = ["buffers_advice", "explained", "with_cast_buffers"]

_OWN = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_NEEDS_VALUES = (".numpy() is not supported for tensor subclasses", "passed to FakeTensor.__format__")
"""Messages of torch and Python where a tensor without values becomes an array or text."""
_DTYPES = ("dtype", "scalar type", "bias type")
"""Phrases in torch's messages about operators whose inputs have different dtypes."""
_SHARDS = ("DTensor", "Sharding propagation failed", "sharding strategy")
"""Phrases in torch's messages about operators that have no rule for sharded tensors."""


@contextmanager
def explained(position: StepPosition, batch: Any) -> Iterator[None]:
    """Raise what a step raises as a RehearsalError that names the module and the line.

    Args:
        position: Where the step is.
        batch: What the model is given, which may be why it fails.
    """
    try:
        yield
    except MmfsdpError:
        raise
    except Exception as error:
        at = _user_line(error)
        where = f" at {at}" if at else ""
        fqn = position.failed or None
        if isinstance(error, CANNOT_BE_FAKED) or any(words in str(error) for words in _NEEDS_VALUES):
            raise RehearsalError(
                f"The step needs the values of a tensor{where}, and a rehearsal has none ({type(error).__name__}: "
                f"{error}). Say how many elements masks select there, as in {argument('assume', 0.1)} for a tenth; "
                "compute with tensors of fixed shapes; or give loss=(model, batch) -> tensor that goes around it. "
                "mmfsdp.planning.estimate_memory() computes all but activations.",
                fqn=fqn,
            ) from error
        hint = _about_optimizers(error) if position.phase == "optimizer" else _about_tokens(error, batch)
        raise RehearsalError(
            f"The step failed in {position.phase}{where}: {type(error).__name__}: {error}{hint}", fqn=fqn
        ) from error


def with_cast_buffers(error: BaseException | None, plan: ShardPlan, model: nn.Module) -> ShardPlan | None:
    """Return a plan that casts buffers to the dtype that parameters compute in; None if that cannot be the remedy.

    Args:
        error: What the step raised.
        plan: The plan of the step.
        model: The model.
    """
    computing = plan.root.precision.param_dtype
    if computing is None or plan.buffer_dtype is not None or not any(words in str(error) for words in _DTYPES):
        return None
    if _floating_buffer(model) is None:
        return None
    return plan.model_copy(update={"buffer_dtype": computing})


def buffers_advice(cast: ShardPlan, model: nn.Module) -> str:
    """Return what to write for a step that fails, and runs by the plan that `with_cast_buffers` returned."""
    dtype = cast.buffer_dtype
    return (
        f". Training also fails there: parameters compute in {dtype}, and floating point buffers such as "
        f'{_floating_buffer(model)!r} keep their dtype. Set precision.buffer_dtype to "{dtype}"; so this step runs.'
    )


def _floating_buffer(model: nn.Module) -> str | None:
    return next((name for name, buffer in model.named_buffers() if buffer.is_floating_point()), None)


def _about_tokens(error: BaseException, batch: Any) -> str:
    """Return how to write tokens, if an embedding got tensors that are not whole numbers, and the batch has such."""
    given = [value for value in tree_leaves(batch) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if "'indices'" not in str(error) or not given:
        return ""
    shape = "x".join(map(str, given[0].shape))
    return (
        f". An embedding takes whole numbers. If they come from the batch, give tokens as torch.int64; on a command "
        f"line: --batch {shape}:int64."
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
