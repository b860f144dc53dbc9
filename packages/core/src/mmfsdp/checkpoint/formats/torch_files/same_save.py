"""Tells files of ranks of two saves apart by what they count: epochs, iterations, and steps of the optimizer.

Files of ``torch.save`` hold nothing that ties them together. Their tensors may fit each other though they are of two
steps of a run; a counter that all ranks agree on does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_same_save"]

_NUMBERS = (
    *("epoch", "step", "iter", "iteration", "global_step", "global_steps"),
    *("last_epoch", "last_step", "_step_count"),  # of schedulers
)
_SECTIONS = ("meta", "train_state", "trainer_state", "lr_scheduler", "scheduler")
"""Keys under which scripts keep counters, if not at the top. Each rank's data loader goes at its own pace."""


def check_same_save(first: Path, content: Any, other: Path, theirs: Any, name: str = "") -> None:
    """Raise if a counter differs between the files of two ranks.

    Args:
        first: The file to compare with.
        content: What it holds.
        other: The other file.
        theirs: What that holds.
        name: What the content is called, if it may be a counter itself.

    Raises:
        CorruptCheckpointError: One differs.
    """
    found = dict(_counters(theirs, name))
    for path, value in _counters(content, name):
        if path not in found or found[path] == value:
            continue
        shown = [repr(held) if isinstance(held, int | float) else "another" for held in (found[path], value)]
        raise CorruptCheckpointError(
            f"{other.name} is of another save ({path} {shown[0]}) than {first.name} ({shown[1]}). Use the files of one "
            "save only.",
            file=str(other),
        )


def _counters(content: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the counters in the content of a file, with their paths."""
    if name in _NUMBERS and _is_number(content):
        yield name, content
    if not isinstance(content, dict):
        return
    yield from _numbers("", content)
    for key, part in content.items():
        if isinstance(part, dict):
            yield from _numbers(f"{key}/", part) if key in _SECTIONS else ()
            yield from _steps(f"{key}/", part)
    yield from _steps("", content)


def _numbers(prefix: str, part: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((prefix + key, part[key]) for key in _NUMBERS if _is_number(part.get(key)))


def _steps(prefix: str, part: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the steps in the state of an optimizer, if a part is one."""
    state = part.get("state")
    for param, entries in state.items() if isinstance(state, dict) else ():
        step = entries.get("step") if isinstance(entries, dict) else None
        if _is_number(step):
            yield f"{prefix}state/{param}/step", step
        elif isinstance(step, PickledTensor) and step.record.crc32 is not None:
            # The value is not read: its checksum is enough.
            offset = step.offset - step.record.offset
            yield f"{prefix}state/{param}/step", (step.dtype, step.shape, offset, step.record.nbytes, step.record.crc32)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
