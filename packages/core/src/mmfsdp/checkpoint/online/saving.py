"""Writing a checkpoint directory from all ranks: each rank its own files, and all of it or nothing appears."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mmfsdp.checkpoint.copying.atomic import commit, discard, refuse_existing, temporary_sibling
from mmfsdp.checkpoint.copying.write_errors import not_written, of_file
from mmfsdp.checkpoint.manifest import FileEntry, write_manifest
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective import Scope, gather_to_first, on_all_ranks, shared
from mmfsdp.errors import FormatError, MmfsdpError
from mmfsdp.state.boxes import box_of
from mmfsdp.state.nested import NestedSavePlanner

__all__ = ["DirectorySave", "as_checkpoint_error", "save_archive", "write_distributed", "write_rank_file"]

Files = dict[str, FileEntry]


@dataclass(frozen=True)
class DirectorySave:
    """One save of a directory by several ranks, from the moment that its target was found free."""

    target: Path
    """Where the directory will appear."""
    temporary: Path
    """Where it is written."""
    save_id: str
    """Sixteen hexadecimal digits, the same on every rank."""
    rank: int
    """This rank's place among those that save."""
    world_size: int
    """How many ranks save."""
    overwrite: bool
    """Replace what is at the target, once the new one is complete."""

    @classmethod
    def begin(cls, target: Path, scope: Scope, *, rank: int, world_size: int, overwrite: bool) -> DirectorySave:
        """Create the temporary directory. Collective: every rank of the scope.

        Raises:
            CheckpointError: It cannot be created, or the target exists and is not to be replaced.
        """

        def create() -> tuple[Path, str]:
            if not overwrite:
                refuse_existing(target)
            with as_checkpoint_error(target):
                temporary = temporary_sibling(target)
                temporary.mkdir()
            return temporary, secrets.token_hex(8)

        temporary, save_id = shared(lambda: create() if rank == 0 else None, scope)
        return cls(target, temporary, save_id, rank, world_size, overwrite)

    def finish(self, write: Callable[[DirectorySave], Files], scope: Scope) -> None:
        """Write on every rank, then add the manifest and move everything in place. Collective.

        Args:
            write: Writes this rank's files into `temporary` and returns them.
            scope: Through which the ranks talk.

        Raises:
            CheckpointError: It could not be written; raised on every rank, and nothing of it is left.
        """

        def complete(parts: list[Files] | None) -> None:
            if parts is None:
                return
            with as_checkpoint_error(self.target):
                files = {name: entry for part in parts for name, entry in part.items()}
                write_manifest(self.temporary, save_id=self.save_id, world_size=self.world_size, files=files)
                commit(self.temporary, self.target, overwrite=self.overwrite)

        try:
            own = on_all_ranks(lambda: write(self), scope)
            parts = gather_to_first(scope, own)
            on_all_ranks(lambda: complete(parts), scope)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove what was written so far; the target is untouched. Not collective."""
        if self.rank == 0:
            discard(self.temporary)


def write_rank_file(save: DirectorySave, content: Mapping[str, Any]) -> Files:
    """Write this rank's file of a ``local`` checkpoint: what it holds, and which boxes of the whole that is."""
    path = save.temporary / f"rank{save.rank}.pth"
    with as_checkpoint_error(save.target / path.name):
        save_archive(_localised(content, save), path)
        return {path.name: FileEntry.of(path)}


def save_archive(content: Mapping[str, Any], path: Path) -> None:
    """Save with ``torch.save``, to a file that says so when its end cannot be written."""
    # Given a path, torch writes through a C++ stream, which is closed in a destructor: a disk that is full by then cuts
    # the file off without a word. A file of Python's is buffered too, since torch ignores that a write can be short.
    with path.open("wb") as file:
        torch.save(dict(content), file)


def write_distributed(save: DirectorySave, content: Mapping[str, Any], group: dist.ProcessGroup) -> Files:
    """Write with torch's distributed checkpoint (DCP). Collective: every rank of the group.

    Args:
        save: Where to.
        content: Nested dicts and lists with DTensors, and tensors that are the same on every rank.
        group: A group with a CPU backend, in which this rank has the place ``save.rank``.

    Raises:
        CheckpointError: It could not be written; raised on every rank.
    """
    with as_checkpoint_error(save.target):
        save_distributed(
            dict(content),
            storage_writer=_Writer(save.temporary, save.target),
            planner=NestedSavePlanner(),
            process_group=group,
        )
        # The names are those of torch/distributed/checkpoint/filesystem.py.
        mine = [*save.temporary.glob(f"__{save.rank}_*.distcp")]
        if save.rank == 0:
            mine.append(save.temporary / ".metadata")
        return {path.name: FileEntry.of(path) for path in mine}


class _Writer(FileSystemWriter):
    """Tells the error of the operating system before it travels: what lies behind an error is lost on the way."""

    def __init__(self, path: Path, target: Path) -> None:
        super().__init__(path)
        self._target = target

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with as_checkpoint_error(self._target):
            return super().write_data(plan, planner)


class as_checkpoint_error:  # noqa: N801 - reads as a statement
    """Whatever goes wrong (a full disk, what cannot be pickled) becomes ours, which travels and names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointException):  # what failed on other ranks, too
            rank, (first, _) = next(iter(sorted(error.failures.items())))
            if isinstance(first, MmfsdpError):
                raise type(first)(first.message, **{**first.context, "rank": rank}) from error
            raise not_written(self._path, first, rank=rank) from error
        if isinstance(error, FormatError):
            raise of_file(error, self._path) from error.__cause__
        if isinstance(error, Exception) and not isinstance(error, MmfsdpError):
            raise not_written(self._path, error) from error


def _localised(content: Mapping[str, Any], save: DirectorySave) -> dict[str, Any]:
    boxes: dict[str, dict[str, list[int]]] = {}

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        local = leaf
        if isinstance(leaf, DTensor):
            boxes[path] = {"shape": list(leaf.shape), "offsets": list(box_of(leaf).offsets)}
            local = leaf.to_local()
        local = local.detach().cpu()
        # A shard is a view into padded memory; torch.save would write all of it.
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        return local

    tree = map_leaves(dict(content), localise)
    header = {
        "format": "rank_local",
        "version": 1,
        "world_size": save.world_size,
        "rank": save.rank,
        "save_id": save.save_id,
        "tensors": boxes,
    }
    return {**tree, "mmfsdp": header}
