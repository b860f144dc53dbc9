"""Recognises files that hold one part of a model that tensor or pipeline parallelism divided, which nothing merges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mmfsdp.basics.arguments import argument
from mmfsdp.errors import FormatError

__all__ = ["other_part", "refuse_part"]

_OF_META = re.compile(r"consolidated\.\d\d\.pth", re.ASCII)
_OF_MEGATRON = re.compile(r"mp_rank(_\d+){1,3}", re.ASCII)  # a directory for each rank of tensors, stages and experts
_NUMBER = re.compile(r"\d+", re.ASCII)


def other_part(path: Path) -> Path | None:
    """Return another part of the model that a file holds a part of; ``None`` if the file holds a whole model."""
    if _OF_META.fullmatch(path.name):
        others = [path.with_name(name) for name in _other_names(path.name)]
    elif _OF_MEGATRON.fullmatch(path.parent.name):
        others = [path.parent.with_name(name) / path.name for name in _other_names(path.parent.name)]
    else:
        return None
    return next((other for other in others if other.exists()), None)


def refuse_part(path: Path) -> None:
    """Raise if a file holds only a part of a model.

    Args:
        path: The file.

    Raises:
        FormatError: It does; the message says what merges the parts.
    """
    other = other_part(path)
    if other is None:
        return
    if _OF_META.fullmatch(path.name):
        shown, beside = path.name, other.name
        advice = "transformers' convert_llama_weights_to_hf.py merges Meta's files into a Hugging Face folder"
    else:
        shown, beside = (f"{part.parent.name}/{part.name}" for part in (path, other))
        advice = (
            "load the checkpoint in Megatron-LM with --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY, "
            "and give that directory"
        )
    raise FormatError(
        f"{shown} holds one part of a model that was divided among ranks, and {beside} another. mmfsdp does not merge "
        f"them: {advice}. To write the tensors of this part alone, pass {argument('source_format', 'torch_zip')}.",
        file=str(path),
    )


def _other_names(name: str) -> Iterator[str]:
    """Yield names that a second part would have: of the first part, or of one that is second in one dimension."""
    numbers = list(_NUMBER.finditer(name))
    if any(int(number[0]) for number in numbers):
        yield _NUMBER.sub(lambda number: "0" * len(number[0]), name)
        return
    for number in numbers:
        yield f"{name[: number.start()]}{1:0{len(number[0])}}{name[number.end() :]}"
