"""Gives the weights and the optimizer's state in a universal checkpoint of DeepSpeed, which has a directory for each.

``zero/{name}/fp32.pt`` holds the weights of a parameter, whole, and ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``
beside it the optimizer's state; ``zero/optimizer_state.pt`` holds its groups (deepspeed/checkpoint/ds_to_universal.py).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.deepspeed.divided_params import grouped, plain
from mmfsdp.checkpoint.formats.deepspeed.rank_files import Files, number, shapes_of
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, read_tree
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["UniversalParams", "check_listed"]

_WEIGHTS, _GROUPS = "fp32", "optimizer_state.pt"
_SETTINGS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


class UniversalParams:
    """The parameters that are trained, each whole in files of its own.

    Args:
        files: The files.
        trust: Keep what is not on the list of safe names as placeholders.

    Raises:
        CheckpointError: Files are missing or damaged.
    """

    def __init__(self, files: Files, *, trust: bool) -> None:
        self._root, self._trust = files.zero, trust
        self.ranks = 1
        """Number of ranks that share them."""
        self.groups = shapes_of(files)
        """The parameters by group of the optimizer, or by sub-group in stage 3."""
        self.shapes = {name: shape for shapes in self.groups for name, shape in shapes.items()}
        """Their shapes."""
        path = inside(self._root, _GROUPS, self._root)
        if not path.exists():
            raise self._lacks(path, "the settings of the optimizer")
        self._optimizer: Mapping[str, Any] = read_tree(path, trust=trust)
        self._keys: dict[int, tuple[str, set[str]]] = {}  # of each group: the first parameter, and its keys

    def weights(self, name: str) -> TensorEntry:
        """Return the weights of a parameter in full precision."""
        path = self._path(name, f"{_WEIGHTS}.pt")
        if not path.exists():
            raise self._lacks(path, f"the weights of {name!r}")
        return self._entry(name, path)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter: a ``TensorEntry`` where each element has a value of its own."""
        folder = self._root / name
        found = {}
        for file in sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".pt")):
            if (key := file.removesuffix(".pt")) not in (_WEIGHTS, "step"):
                found[key] = self._entry(name, self._path(name, file))
        step = self._path(name, "step.pt")
        own = {"step": self._step(step)} if step.exists() else {}
        self._check_keys(name, {*found, *own})
        return {**(own or self._shared_step()), **found}

    def _check_keys(self, name: str, keys: set[str]) -> None:
        """Raise if a parameter lacks a file of the optimizer's state that another one of its group has."""
        group = next(number for number, shapes in enumerate(self.groups) if name in shapes)
        first, expected = self._keys.setdefault(group, (name, keys))
        if keys != expected:
            lacking, key = (name if expected - keys else first), min(expected ^ keys)
            raise self._lacks(self._root / lacking / f"{key}.pt", "which other parameters of its group have")

    def _step(self, path: Path) -> Any:
        step = read_tree(path, trust=self._trust)
        if isinstance(step, PickledTensor | int | float) and math.prod(getattr(step, "shape", ())) == 1:
            return step
        raise CorruptCheckpointError(
            f"{path.relative_to(self._root.parent)} does not hold a step, but something else.", file=str(path)
        )

    def _lacks(self, path: Path, what: str) -> IncompleteCheckpointError:
        return IncompleteCheckpointError(
            f"{self._root.parent.name} lacks {path.relative_to(self._root.parent)}, {what}.", file=str(path)
        )

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with names of parameters."""
        return grouped(self._optimizer.get("param_groups", ()), self.groups, number(self._optimizer["zero_stage"]))

    def undivided(self) -> None:
        """Return ``None``: a universal checkpoint holds no state that belongs to no parameter."""

    def settings(self) -> dict[str, Any]:
        """Return what DeepSpeed keeps beside the optimizer's state, such as the loss scale."""
        return {key: plain(self._optimizer[key]) for key in _SETTINGS if key in self._optimizer}

    def _shared_step(self) -> dict[str, Any]:
        # Stage 3 leaves the step where the first rank's file had it, once for each of its flat tensors, all equal.
        state = self._optimizer.get("optimizer_state_dict", {}).get("state", {})
        return next(({"step": entries["step"]} for entries in state.values() if "step" in entries), {})

    def _path(self, name: str, file: str) -> Path:
        return inside(self._root, f"{name}/{file}", self._root)

    def _entry(self, name: str, path: Path) -> TensorEntry:
        content = read_tree(path, trust=self._trust)
        held = content.get("param") if isinstance(content, dict) else content
        shape = self.shapes[name]
        if not isinstance(held, PickledTensor) or math.prod(held.shape) != math.prod(shape) or held.strides is not None:
            found = f"a tensor of shape {list(held.shape)}" if isinstance(held, PickledTensor) else "no tensor"
            raise CorruptCheckpointError(
                f"zero/{name}/{path.name} holds {found}, but by the file of the model it should be of shape "
                f"{list(shape)}: they are of different saves.",
                file=str(path),
            )
        # Those that are made of stage 3 are flat.
        return TensorEntry(name, held.dtype, shape, (replace(held, shape=shape).chunk((0,) * len(shape)),))


def check_listed(zero: Path, names: Container[str]) -> None:
    """Raise if there is a parameter that the files of the model do not list.

    Args:
        zero: The directory of the parameters.
        names: What the files list.

    Raises:
        IncompleteCheckpointError: There is one.
    """
    for folder in sorted(zero.iterdir()):
        if folder.name not in names and (folder / f"{_WEIGHTS}.pt").exists():
            raise IncompleteCheckpointError(
                f"zero/{folder.name} is there, but no *_model_states.pt beside zero lists this parameter: that of a "
                "stage is missing, or another is in its place.",
                file=str(folder),
            )
