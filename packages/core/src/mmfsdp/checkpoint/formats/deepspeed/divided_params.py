"""Gives the weights and the optimizer's state of parameters that ZeRO divides among the files of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mmfsdp.checkpoint.chunks import Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.deepspeed.flat_ranges import (
    PartitionPiece,
    PieceBoxes,
    Shapes,
    by_parameter,
    by_stretch,
    even_pieces,
)
from mmfsdp.checkpoint.formats.deepspeed.rank_files import Files, RankState, shapes_of
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, fields, integers
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["FrozenParams", "ShardedParams", "plain"]

_PLAIN = bool | int | float | str | None
_SETTINGS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


class ShardedParams:
    """The parameters that are trained, in the flat tensors of ranks.

    Args:
        files: The files.
        look_up: Read the files of all ranks now, and check that they belong together.

    Raises:
        CheckpointError: Files are missing, of another save, or damaged.
    """

    def __init__(self, files: Files, *, look_up: bool) -> None:
        self._files, self._look_up = files, look_up
        self._first = first = files.state(min(files.states))
        self.ranks = first.ranks
        """Number of ranks that share them."""
        self.groups = shapes_of(files)
        """The parameters by group of the optimizer, or by sub-group in stage 3."""
        self.shapes: Shapes = {name: shape for shapes in self.groups for name, shape in shapes.items()}
        """Their shapes."""
        files.check_ranks(first.ranks)
        self._pieces = _pieces(first, self.groups)
        if look_up:
            _check_ranks_agree(files, first)
            if first.stage != 3:
                _check_slices(files, first.ranks, self._pieces)

    def weights(self, name: str) -> TensorEntry:
        """Return the weights of a parameter in full precision."""
        return self._entry(name, "fp32", self._first.flats[self._flat(name)].dtype)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter: a ``TensorEntry`` where each element has a value of its own."""
        if not self._first.states:
            return {}
        flat = self._flat(name)
        return {
            key: self._entry(name, key, value.dtype) if _is_flat(key, value, self._first.flats[flat]) else value
            for key, value in self._first.states[flat].items()
        }

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with names of parameters, and with settings if DeepSpeed kept any."""
        held = self._first.optimizer.get("param_groups")
        if not held:
            return [{"params": [*shapes]} for shapes in self.groups] if self._first.states else []
        return grouped(held, self.groups, self._first.stage)

    def undivided(self) -> list[Any] | None:
        """Return the optimizer's state by rank, as stored, if its values cannot be assigned; else ``None``.

        Optimizers in 8 bits keep scales that belong to neither one element nor all.
        """
        first = self._first
        for flat, entries in zip(first.flats, first.states, strict=False):
            for key, value in entries.items():
                odd = isinstance(value, PickledTensor) and value.shape not in ((), (1,))
                if odd and not _is_flat(key, value, flat):
                    states = [self._files.state(rank).states for rank in range(first.ranks)]
                    return [[dict(each) for each in state] for state in states]
        return None

    def settings(self) -> dict[str, Any]:
        """Return what DeepSpeed keeps beside the optimizer's state, such as the loss scale."""
        return {key: plain(self._first.content[key]) for key in _SETTINGS if key in self._first.content}

    def _flat(self, name: str) -> int:
        pieces = self._pieces[name]
        return pieces[0].flat if pieces else 0

    def _entry(self, name: str, key: str, dtype: str) -> TensorEntry:
        return _entry(self._files, name, key, dtype, self.shapes[name], self._pieces[name], look_up=self._look_up)


class FrozenParams:
    """The frozen parameters that stage 3 divides among the files of the model.

    Args:
        files: The files.
        look_up: Read the files of all ranks now.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, files: Files, *, look_up: bool) -> None:
        self._files, self._look_up = files, look_up
        given, fragments = (files.model().get(f"frozen_param_{part}") for part in ("shapes", "fragments"))
        divided = files.is_partitioned and isinstance(given, dict) and isinstance(fragments, dict)
        [self.shapes] = shapes_of(files, [given]) if divided else [{}]
        """Their shapes; empty if they lie with the buffers."""

    def weights(self, name: str) -> TensorEntry:
        """Return the weights of a parameter as they are stored."""
        files, shape = self._files, self.shapes[name]
        held, _ = files.tensor(f"frozen/{name}", min(files.models), 0)
        pieces = even_pieces(math.prod(shape), len(files.models))
        return _entry(files, name, f"frozen/{name}", held.dtype, shape, pieces, look_up=self._look_up)


def _entry(
    files: Files,
    name: str,
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    pieces: Sequence[PartitionPiece],
    *,
    look_up: bool,
) -> TensorEntry:
    boxes = PieceBoxes(shape, pieces, partial(files.locate_box, key))
    locate = partial(files.locate, name, key, dtype)
    return TensorEntry(name, dtype, shape, locate(boxes.meeting(None)) if look_up else Unlocated(boxes, locate))


def _pieces(first: RankState, groups: Sequence[Shapes]) -> dict[str, list[PartitionPiece]]:
    """Return the location of every parameter, as the file of one rank states it."""
    lengths = [flat.shape[0] if len(flat.shape) == 1 else 0 for flat in first.flats]
    if first.stage == 3:
        found = by_parameter(groups, lengths, first.ranks)
    else:
        gaps = first.content.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
        if not len(groups) == len(lengths) == len(gaps) or [*map(len, gaps)] != [*map(len, groups)]:
            raise _odd(first, f"it has {len(lengths)} groups of weights (expected {len(groups)})")
        found = {}
        for number, (shapes, stretch, own) in enumerate(zip(groups, lengths, gaps, strict=True)):
            wanted = sum(math.prod(shape) for shape in shapes.values())
            if wanted > stretch * first.ranks:
                raise _odd(
                    first, f"its group {number} is of {stretch * first.ranks} weights on all ranks (expected {wanted})"
                )
            found |= by_stretch(number, shapes, stretch, [integers((gap,))[0] for gap in own])
    for name, numel in ((name, math.prod(shape)) for shapes in groups for name, shape in shapes.items()):
        reached = 0
        for piece in found[name]:
            reached = piece.stop if piece.start == reached else reached
        if reached != numel:
            raise _odd(first, f"by its size, only the first {reached} of the {numel} elements of {name!r} are stored")
    return found


def grouped(held: Sequence[Mapping[str, Any]], groups: Sequence[Shapes], stage: int) -> list[dict[str, Any]]:
    """Return the optimizer's groups with names of parameters for the numbers of flat tensors."""
    flats: Iterator[Shapes] = iter(groups)
    named = []
    for group in held:
        own = [next(flats, {}) for _ in (group["params"] if stage == 3 else (0,))]
        named.append({**group, "params": [name for shapes in own for name in shapes]})
    return named


def _is_flat(key: str, value: Any, flat: PickledTensor) -> bool:
    """Tell whether a value has as many elements as a flat tensor of weights, perhaps with padding at the end."""
    return (
        isinstance(value, PickledTensor) and key != "step" and len(value.shape) == 1 and value.shape[0] >= flat.shape[0]
    )


def plain(value: Any) -> Any:
    """Return the attributes of an object, such as DeepSpeed's loss scaler, that need no class to be read."""
    if not isinstance(value, PickledObject):
        return value
    return {key: inner for key, inner in fields(value).items() if isinstance(inner, _PLAIN)}


def _odd(first: RankState, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{first.path.name} does not belong to the file of the model beside it: {reason}.", file=str(first.path)
    )


def _check_ranks_agree(files: Files, first: RankState) -> None:
    """Raise unless all ranks' files agree on everything but their own weights; reads each of them.

    Raises:
        CorruptCheckpointError: One differs: it is of another save.
    """
    expected = _of_save(first)
    for rank in files.states:
        state = files.state(rank)
        for (what, found), (_, wanted) in zip(_of_save(state), expected, strict=True):
            if found != wanted:
                raise CorruptCheckpointError(
                    f"{state.path.name} is of another save than {first.path.name}: its {what} is {found!r}, and there "
                    f"it is {wanted!r}.",
                    file=str(state.path),
                )
    steps = {rank: files.model(rank).get("global_steps") for rank in files.models}
    other = next((rank for rank, step in steps.items() if step != steps[min(steps)]), None)
    if other is not None:
        raise CorruptCheckpointError(
            f"{files.models[other].name} is of another save (step {steps[other]}) than "
            f"{files.models[min(steps)].name} (step {steps[min(steps)]}).",
            file=str(files.models[other]),
        )


def _of_save(state: RankState) -> list[tuple[str, Any]]:
    """Return values that are the same on all ranks, each with a name."""
    scaler = state.content.get("loss_scaler")
    scale = fields(scaler) if isinstance(scaler, PickledObject) else {}
    steps = [entries.get("step") for entries in (*state.states, *state.optimizer.get("param_groups", ()))]
    return [
        ("stage of ZeRO", state.stage),
        ("number of ranks", state.ranks),
        ("number of flat tensors", len(state.flats)),
        ("dtype", [flat.dtype for flat in state.flats]),
        ("step", [_comparable(step) for step in steps]),
        ("loss scale", (scale.get("cur_scale"), scale.get("cur_iter"))),
        ("release of DeepSpeed", state.content.get("ds_version")),
    ]


def _comparable(step: Any) -> Any:
    # A tensor's value is not read: its checksum is enough.
    return (step.dtype, step.record.crc32) if isinstance(step, PickledTensor) else step


def _check_slices(files: Files, ranks: int, pieces: Mapping[str, Sequence[PartitionPiece]]) -> None:
    """Raise unless parameters are where each rank's file itself says, in stages 1 and 2 since DeepSpeed 0.8.

    Raises:
        CorruptCheckpointError: One is somewhere else.
    """
    expected: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for name, parts in pieces.items():
        for piece in parts:
            expected.setdefault((piece.rank, piece.flat), {})[name] = piece.at, piece.stop - piece.start
    for rank in range(ranks):
        state = files.state(rank)
        for flat, said in enumerate(state.content.get("param_slice_mappings") or ()):
            held = {name: (fields(part)["start"], fields(part)["numel"]) for name, part in said.items()}
            wanted = expected.get((rank, flat), {})
            if held == wanted:
                continue
            name = next(name for name in {**held, **wanted} if held.get(name) != wanted.get(name))
            raise CorruptCheckpointError(
                f"{state.path.name} holds {_extent(held.get(name))} of {name!r}, but by the model's file these should "
                f"be {_extent(wanted.get(name))}: they are of different saves.",
                file=str(state.path),
            )


def _extent(found: tuple[int, int] | None) -> str:
    return "no elements" if found is None else f"{found[1]} elements from {found[0]} on"
