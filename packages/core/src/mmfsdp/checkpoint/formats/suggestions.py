"""Finds the checkpoint that a user probably meant, for error messages: within the given path, beside it or above it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.formats.registry import FORMATS
from mmfsdp.checkpoint.formats.source import OF_DEEPSPEED, Source

__all__ = ["nearby", "of_deepspeed_within", "optimizers_beside", "weights_beside"]

_MOST_TRIED, _MOST_DIRECTORIES = 100, 10  # names in a directory
_OPTIMIZER = re.compile(r"(.*/)?optim.*")
_NO_WEIGHTS = re.compile(  # what trainers save beside weights and optimizer
    r"(rng_state|random_states|scheduler|lr_scheduler|training_args|scaler|sampler|dl_state_dict|data)(_\d+)?"
    r"\.(bin|pt|pth)|rng|dataloader"
)


def nearby(source: Source) -> str:
    """Return a sentence that names the checkpoints within a directory, or the one that the directory is part of."""
    path, names = source.path, source.names
    unfinished = any(name.endswith(".distcp") for name in names)
    names = [name for name in names if not name.endswith(".distcp")]  # which are parts
    inner = _within(path, names) or [
        f"{name}/{below}" for name in names[:_MOST_DIRECTORIES] for below in _within(path / name)
    ]
    if inner:
        return f" Open a checkpoint within it: {name_list(inner)}."
    if names and not unfinished and not is_remote(path):
        above = path.absolute().parent
        if _looks_like_checkpoint(above):
            return f" The directory above it is a checkpoint: {str(above)!r}."
    return ""


def optimizers_beside(path: Path) -> list[str]:
    """Return the names beside a checkpoint's that are of optimizers, as accelerate's ``optimizer_0``."""
    return [name for name in _beside(path) if _OPTIMIZER.fullmatch(name)]


def weights_beside(path: Path) -> list[str]:
    """Return the names of other checkpoints beside one that is of an optimizer; none for others."""
    if not _OPTIMIZER.fullmatch(path.name):
        return []
    return [name for name in _beside(path) if not _OPTIMIZER.fullmatch(name)]


def of_deepspeed_within(path: Path) -> str | None:
    """Return the name of DeepSpeed's checkpoint within a folder of weights, as transformers' Trainer writes both."""
    if is_remote(path) or not (path / "latest").is_file():
        return None
    try:
        names = [name for name in Source(path).names if (path / name).is_dir()]
        return next(
            (name for name in names if any(file.endswith(OF_DEEPSPEED) for file in Source(path / name).names)), None
        )
    except OSError:
        return None


def _beside(path: Path) -> list[str]:
    if is_remote(path):
        return []
    path = path.absolute()
    return [name for name in _within(path.parent) if name != path.name]


def _within(directory: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the names in a directory, if it is one, that look like checkpoints, those of optimizers last."""
    try:
        if names is None:
            names = Source(directory).names
        tried = [name for name in names if not _NO_WEIGHTS.fullmatch(name)][:_MOST_TRIED]
        found = [name for name in tried if _looks_like_checkpoint(directory / name)]
    except OSError:  # what cannot be read is not suggested
        return []
    return sorted(found, key=lambda name: _OPTIMIZER.fullmatch(name) is not None)


def _looks_like_checkpoint(path: Path) -> bool:
    source, directory = Source(path), path.is_dir()
    return (directory or path.is_file()) and any(
        item.directory == directory and item.sniff is not None and item.sniff(source) for item in FORMATS
    )
