"""Writes a directory of torch's distributed checkpoint (DCP), and takes the checksums of its files on the way."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mmfsdp.checkpoint.files.disk import not_written
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.lost_ranks import is_lost
from mmfsdp.errors import MmfsdpError, StateDictError
from mmfsdp.saving.archives import SummedFile
from mmfsdp.saving.publishing import DirectorySave, Files, as_checkpoint_error

__all__ = ["flattened", "write_distributed"]

KeyPath = tuple[str | int, ...]


def write_distributed(save: DirectorySave, content: Mapping[str, Any], group: dist.ProcessGroup) -> Files:
    """Write with torch's distributed checkpoint (DCP). Collective: every rank of the group.

    Args:
        save: The save that the files belong to.
        content: Nested dicts and lists with DTensors, and tensors that are the same on every rank.
        group: A group of the ranks that save, with a CPU backend.

    Returns:
        This rank's files; on the group's first rank also ``.metadata``.

    Raises:
        CheckpointError: The files could not be written; raised on every rank.
    """
    writer = _Writer(save.temporary, save.target)
    try:
        with as_checkpoint_error(save.target), naming_lost_ranks("ranks wrote a checkpoint"):
            save_distributed(
                dict(content), storage_writer=writer, planner=_Planner(save.rank == 0), process_group=group
            )
    except CheckpointException as error:  # also lists what failed on other ranks
        rank, (first, _) = next(iter(sorted(error.failures.items())))
        with naming_lost_ranks("ranks wrote a checkpoint"):
            if is_lost(first):
                raise first from error
        if isinstance(first, MmfsdpError):
            raise type(first)(first.message, **{**first.context, "rank": rank}) from error
        raise not_written(save.target, first, rank=rank) from error
    files = {name: file.entry() for name, file in writer.files.written.items() if (save.temporary / name).exists()}
    metadata = save.temporary / ".metadata"
    if group.rank() == 0:
        files[metadata.name] = FileEntry.of(metadata)
    return files


class _Planner(DefaultSavePlanner):
    """torch's planner with names from `flattened`.

    Values that are not sharded come from the first rank: buffers such as running statistics may differ between ranks.
    If several replicas hold a shard, torch gives it to the one that has the least to write so far.

    Args:
        is_first: Whether this is the first rank of the mesh.
    """

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """See torch's `SavePlanner`."""
        names = {
            name: found
            for name, found in flattened(state_dict).items()
            if self._is_first or isinstance(found[1], DTensor)
        }
        self.is_coordinator = is_coordinator
        self.state_dict = {name: value for name, (_, value) in names.items()}
        self.mappings = {name: path for name, (path, _) in names.items()}


class _SummingFiles(FileSystem):
    """torch's file system, which also takes the checksum of every file that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, SummedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """See torch's `FileSystem`."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summed = self.written[Path(path).name] = SummedFile(stream)
            yield summed


class _Writer(FileSystemWriter):
    """torch's writer, whose errors name the cause: an error that travels to another rank loses its ``__cause__``."""

    def __init__(self, path: Path, target: Path) -> None:
        super().__init__(path)
        self._target = target
        self.fs = self.files = _SummingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with as_checkpoint_error(self._target):
            return super().write_data(plan, planner)


def flattened(content: Mapping[str, Any]) -> dict[str, tuple[KeyPath, Any]]:
    """Return nested content by the flat names that DCP stores it under.

    torch's planner stores ``{'a': {'b': ...}}`` as ``'a.b'`` and notes the keys. That loses empty dicts and turns keys
    that are not strings into strings. Here such parts are stored as one object each, and everything else under torch's
    own names, so that ``torch.distributed.checkpoint.load`` finds it.

    Returns:
        By flat name, the keys that lead to a value, and the value: a tensor or an object.

    Raises:
        StateDictError: A DTensor lies in a tuple or below a key that is not a string, or two paths get the same name.
    """
    found: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in _leaves((), content):
        name = ".".join(map(str, path))
        if name in found:
            raise StateDictError(
                f"The keys {found[name][0]!r} and {path!r} would both be stored as {name!r}. Rename one of them."
            )
        found[name] = path, value
    return found


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif isinstance(value, list) and not _is_plain(value):
        for index, child in enumerate(value):
            yield from _leaves((*path, index), child)
    else:
        if not isinstance(value, torch.Tensor) and _holds_shards(value):
            raise StateDictError(
                f"{'.'.join(map(str, path))!r} is a {type(value).__name__} with sharded tensors, which cannot be "
                "stored in parts. Use lists, and dicts with strings as keys."
            )
        yield path, value


def _is_plain(values: list[Any]) -> bool:
    """Whether torch keeps a list as one object: it holds neither tensors nor dicts."""
    return not any(
        isinstance(value, Mapping | torch.Tensor) or (isinstance(value, list) and not _is_plain(value))
        for value in values
    )


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_holds_shards, value)))
