"""Recognises files that hold one part of a model that tensor or pipeline parallelism divided, which nothing merges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mmfsdp.basics.arguments import argument
from mmfsdp.errors import FormatError

__all__ = ["other_part", "refuse_part", "what_merges"]

_OF_META = re.compile(r"consolidated\.\d\d\.pth", re.ASCII)
_OF_FAIRSEQ = re.compile(r".*model_part-\d+\.pt", re.ASCII)
# A directory for each rank: of tensors, and of stages and experts if there are any.
_OF_MEGATRON = re.compile(r"mp_rank(_\d+){1,3}|tp_rank_\d+_pp_rank_\d+", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)


def other_part(path: Path) -> Path | None:
    """Return another part of the model that a file holds a part of; ``None`` if the file holds a whole model."""
    if _OF_META.fullmatch(path.name) or _OF_FAIRSEQ.fullmatch(path.name):
        number = list(_NUMBER.finditer(path.name))[-1]
        others = [path.with_name(name) for name in _other_names(path.name, [number])]
    elif _OF_MEGATRON.fullmatch(path.parent.name):
        name = path.parent.name
        others = [path.parent.with_name(other) / path.name for other in _other_names(name, [*_NUMBER.finditer(name)])]
    else:
        return None
    return next((other for other in others if other.exists()), None)


def what_merges(path: Path) -> str | None:
    """Return a sentence on what merges the parts of a model; ``None`` if the file does not hold a part."""
    if other_part(path) is None:
        return None
    if _OF_META.fullmatch(path.name):
        tool = "transformers' convert_llama_weights_to_hf.py merges Meta's files into a Hugging Face folder"
    elif _OF_FAIRSEQ.fullmatch(path.name):
        tool = "metaseq's convert_to_singleton.py merges its files"
    elif path.suffix == ".ckpt":
        tool = "NeMo's megatron_change_num_partitions.py merges its files"
    else:
        tool = (
            "load the checkpoint in Megatron-LM with --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY, "
            "and give that directory"
        )
    return f"mmfsdp does not merge parts of a model that was divided among ranks: {tool}."


def refuse_part(path: Path) -> None:
    """Raise if a file holds only a part of a model.

    Args:
        path: The file.

    Raises:
        FormatError: It does; the message says what merges the parts.
    """
    other, merges = other_part(path), what_merges(path)
    if other is None:
        return
    depth = 1 if other.parent == path.parent else 2
    shown, beside = ("/".join(part.parts[-depth:]) for part in (path, other))
    raise FormatError(
        f"{shown} holds one part of a model, and {beside} another. {merges} To write the tensors of this part alone, "
        f"pass {argument('source_format', 'torch_zip')}.",
        file=str(path),
    )


def _other_names(name: str, numbers: list[re.Match[str]]) -> Iterator[str]:
    """Yield names that a second part would have: the first part's, or one that is second in one dimension."""
    later = any(int(number[0]) for number in numbers)
    for changed in [numbers] if later else [[number] for number in numbers]:
        other = name
        for number in changed:
            text = f"{int(not later):0{len(number[0])}}"
            other = f"{other[: number.start()]}{text}{other[number.end() :]}"
        yield other
