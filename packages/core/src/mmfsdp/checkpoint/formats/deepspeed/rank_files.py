"""Sorts the files of DeepSpeed by rank, reads each when it is asked for, and checks that no rank's is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.formats.deepspeed.flat_ranges import PartitionPiece, Shapes
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, read_tree
from mmfsdp.checkpoint.integrity import add_rank_file, inside
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, integers
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["RANK_FILE", "WHOLE_FILE", "Files", "FlatLocation", "RankState", "number", "shapes_of"]

RANK_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(?P<stage>\d{2,9})_(?P<kind>model|optim)_states\.pt", re.ASCII
)
"""The name of a rank's file of the model or of the optimizer."""
WHOLE_FILE = re.compile(r"mp_rank_(?P<stage>\d{2,9})_model_states\.pt", re.ASCII)
"""The name of the one file of the model."""
_MOST_RANKS = 1_000_000  # more is damage, or malice


class FlatLocation(NamedTuple):
    """The location of a box of a tensor."""

    file: str
    """Path of the file, which is read when the box is."""
    rank: int
    """Rank that wrote it."""
    flat: int
    """Index among its flat tensors."""
    at: int
    """First element in that flat tensor."""
    offset: int = 0
    """No byte of the file needs to be compared with a manifest: DeepSpeed writes none."""
    length: int = 0
    """See ``offset``."""


@dataclass(frozen=True)
class RankState:
    """One rank's part of the optimizer's state, which includes the weights in full precision."""

    path: Path
    """The file."""
    stage: int
    """Stage of ZeRO; 1 for the optimizer for bfloat16, which does not say."""
    ranks: int
    """Number of ranks that share the parameters."""
    flats: tuple[PickledTensor, ...]
    """The weights of each group, flat."""
    states: tuple[Mapping[str, Any], ...]
    """The optimizer's state of each group, by key; empty if there is none."""
    content: Mapping[str, Any]
    """Everything that it holds."""
    optimizer: Mapping[str, Any]
    """The state of the optimizer that DeepSpeed wraps, but for the tensors."""


def number(value: Any) -> int:
    """Return an integer, or the value of an enumeration of integers that a pickle describes.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, PickledObject) and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int or not 0 <= value <= _MOST_RANKS:
        raise ValueError(f"{value!r} is not a number")
    return value


class Files:
    """The files of one checkpoint, or of one stage of a pipeline, each read when it is asked for.

    They can be sent to other ranks.

    Args:
        folder: The directory.
        names: Their names.
        stage: Number of the stage.
        trust: Keep what is not on the list of safe names as placeholders.

    Raises:
        CorruptCheckpointError: There are two of one rank.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, stage: int = 0, trust: bool = False) -> None:
        self.folder, self.stage, self._trust = folder, stage, trust
        self.models: dict[int, Path] = {}
        """The files of the model by rank: one but for stage 3."""
        self.states: dict[int, Path] = {}
        """The files of the optimizer by rank."""
        self.is_partitioned = False
        """Whether each rank has a file of the model, as in stage 3."""
        for name in names:
            self._add(name)
        self.models, self.states = dict(sorted(self.models.items())), dict(sorted(self.states.items()))
        self.zero = folder / "zero"
        """The directory of a universal checkpoint's parameters."""
        self.is_universal = self.zero.is_dir() and not self.states
        """Whether it is there."""
        self._trees: dict[Path, Any] = {}
        self._known: dict[int, RankState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trees": {}, "_known": {}}

    def _add(self, name: str) -> None:
        path = inside(self.folder, name, self.folder)
        of_rank = RANK_FILE.fullmatch(name)
        of_model = of_rank is None or of_rank["kind"] == "model"
        self.is_partitioned |= of_rank is not None and of_model
        add_rank_file(self.models if of_model else self.states, int(of_rank[1]) if of_rank else 0, path)

    def model(self, rank: int | None = None) -> Mapping[str, Any]:
        """Return the content of a rank's file of the model; of the lowest rank's by default."""
        rank = min(self.models, default=0) if rank is None else rank
        if rank not in self.models:
            name = f"mp_rank_{self.stage:02d}_model_states.pt"
            name = f"zero_pp_rank_{rank}_{name}" if rank else name
            raise IncompleteCheckpointError(
                f"{self.folder.name} lacks {name}, the file of the model.", file=str(self.folder / name)
            )
        return self._content(self.models[rank], "module")

    def state(self, rank: int) -> RankState:
        """Return what a rank's file of the optimizer holds.

        Raises:
            CorruptCheckpointError: It holds something else.
        """
        if rank not in self._known:
            path = self.states[rank]
            content = self._content(path, "optimizer_state_dict")["optimizer_state_dict"]
            try:
                self._known[rank] = _state(path, content)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise CorruptCheckpointError(
                    f"{path.name} does not hold what DeepSpeed writes: {type(error).__name__}: {error}.", file=str(path)
                ) from error
        return self._known[rank]

    def _content(self, path: Path, key: str) -> Mapping[str, Any]:
        if path not in self._trees:
            tree = read_tree(path, trust=self._trust)
            if isinstance(tree, dict) and key == "module" and tree.get(key, 0) is None:  # of a pipeline: see its layers
                tree = {**tree, key: {}}
            if not isinstance(tree, dict) or not isinstance(tree.get(key), dict):
                raise FormatError(
                    f"{path.name} is named as a file of DeepSpeed, but has no dict {key!r}.", file=str(path)
                )
            self._trees[path] = tree
        content: Mapping[str, Any] = self._trees[path]
        return content

    def tensor(self, key: str, rank: int, flat: int) -> tuple[PickledTensor, Path]:
        """Return a rank's flat tensor, and the file that should hold it.

        Args:
            key: ``'fp32'`` for the weights, ``'frozen/NAME'`` for a frozen parameter, or a key of the optimizer's
                state, such as ``'exp_avg'``.
            rank: The rank.
            flat: Which of its flat tensors.
        """
        kind, _, name = key.partition("/")
        if kind == "frozen":
            fragments = self.model(rank).get("frozen_param_fragments")
            path, found = self.models[rank], fragments.get(name) if isinstance(fragments, dict) else None
        else:
            state = self.state(rank)
            held = state.flats if kind == "fp32" else [entries.get(kind) for entries in state.states]
            path, found = state.path, held[flat] if flat < len(held) else None
        if not isinstance(found, PickledTensor):
            raise IncompleteCheckpointError(f"{path.name} lacks {key!r} of group {flat}.", file=str(path))
        return found, path

    def locate(self, name: str, key: str, dtype: str, boxes: Mapping[Bounds, FlatLocation]) -> tuple[Chunk, ...]:
        """Return where boxes of a tensor are.

        Raises:
            CheckpointError: A file is missing or damaged, or of another save.
        """
        return tuple(self._chunk(name, key, dtype, box, location) for box, location in boxes.items())

    def _chunk(self, name: str, key: str, dtype: str, box: Bounds, location: FlatLocation) -> Chunk:
        held, path = self.tensor(key, location.rank, location.flat)
        chunk = PickledTensor(dtype, box[1], held.offset + location.at * itemsize(dtype), None, held.record).chunk(
            box[0]
        )
        numel = held.shape[0] if len(held.shape) == 1 and held.strides is None else 0
        if held.dtype != dtype or location.at + chunk.numel > numel:
            raise CorruptCheckpointError(
                f"{path.name} holds {held.dtype} of shape {list(held.shape)} where {dtype} with at least "
                f"{location.at + chunk.numel} elements of {name!r} is expected: it is of another save.",
                file=str(path),
            )
        return chunk

    def check_ranks(self, ranks: int) -> None:
        """Raise unless there is one file for each of ``ranks`` ranks, and no other."""
        for kind, files in (("optim", self.states), ("model", self.models if self.is_partitioned else {0: Path()})):
            expected = ranks if kind == "optim" or self.is_partitioned else 1
            like = next(iter(files.values())).name if files else "zero_pp_rank_0"
            name = re.compile(r"(?<=pp_rank_)\d+")
            absent = [name.sub(str(rank), like) for rank in range(expected) if rank not in files]
            if absent:
                raise IncompleteCheckpointError(
                    f"The checkpoint is of {ranks} ranks, but {missing(absent, quoted=True)}.",
                    file=str(self.folder / absent[0]),
                )
            if extra := [path for rank, path in files.items() if rank >= expected]:
                raise CorruptCheckpointError(
                    f"The checkpoint is of {ranks} ranks, but {extra[0].name} is there: it is left over from "
                    "another save; remove it.",
                    file=str(extra[0]),
                )

    def locate_box(self, key: str, piece: PartitionPiece, at: int) -> FlatLocation:
        """Return the location of a box that begins at an element of a flat tensor."""
        files = self.models if key.startswith("frozen/") else self.states
        return FlatLocation(str(files[piece.rank]), piece.rank, piece.flat, at)


def _state(path: Path, content: Mapping[str, Any]) -> RankState:
    stage = number(content.get("zero_stage", 1))
    counts = content["partition_count"]
    ranks = {number(count) for count in (counts if isinstance(counts, list | tuple) else [counts])}
    if len(ranks) != 1:
        raise ValueError(f"its groups are shared by {sorted(ranks)} ranks, as experts' are")
    flats = content["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    if not all(isinstance(flat, PickledTensor) for flat in flats):
        raise ValueError("its weights are not flat tensors")
    wrapped = content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state", {})
    if isinstance(wrapped, list):  # with elastic_checkpoint, the states alone
        states: list[Any] = wrapped
        wrapped = {}
    else:
        by_id = wrapped.get("state", {})
        groups = wrapped.get("param_groups", [])
        ids = [key for group in groups for key in group["params"]] if stage == 3 else range(len(flats))
        states = [by_id.get(key, {}) for key in ids] if by_id else []
    if not isinstance(wrapped, dict) or not all(isinstance(entries, dict) for entries in states):
        raise ValueError("its optimizer's state is not in dicts")
    return RankState(path, stage, ranks.pop(), tuple(flats), tuple(states), content, wrapped)


def shapes_of(files: Files, given: Any = None) -> list[Shapes]:
    """Return the shapes of parameters by name, in lists as the file of the model has them.

    Args:
        files: The files.
        given: The lists; by default, the lists of trained parameters.

    Raises:
        FormatError: There are none.
        CorruptCheckpointError: They are malformed.
    """
    path = files.models[min(files.models)] if files.models else files.folder
    given = files.model().get("param_shapes") if given is None else given
    if given is None:
        raise FormatError(
            f"{path.name} does not hold the shapes of the parameters, as of releases of DeepSpeed before 0.4. Load the "
            "checkpoint with that release, and save the model's state dict.",
            file=str(path),
        )
    try:
        return [{str(name): integers(shape) for name, shape in shapes.items()} for shapes in given]
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path.name} holds malformed shapes of parameters: {error}.", file=str(path)
        ) from error
