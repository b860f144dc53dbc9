"""Proves, as far as DeepSpeed's files allow it, that those of all ranks are of one save and divided as expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmfsdp.checkpoint.formats.deepspeed.flat_ranges import Piece
from mmfsdp.checkpoint.formats.deepspeed.rank_files import Files, RankState
from mmfsdp.checkpoint.formats.torch_zip import PickledTensor
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, fields
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_ranks_agree", "check_slices"]


def check_ranks_agree(files: Files, first: RankState) -> None:
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
    """Return what is the same on all ranks, each with a name."""
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


def check_slices(files: Files, ranks: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
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
