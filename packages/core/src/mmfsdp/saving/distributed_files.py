"""Writing with torch's distributed checkpoint (DCP): work shared by replicas, checksums taken on the way."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mmfsdp.checkpoint.files.file_errors import not_written
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.lost_ranks import is_lost
from mmfsdp.errors import MmfsdpError
from mmfsdp.saving.nested import NestedSavePlanner
from mmfsdp.saving.publishing import DirectorySave, Files, as_checkpoint_error
from mmfsdp.saving.rank_files import SummedFile

__all__ = ["write_distributed"]


def write_distributed(save: DirectorySave, content: Mapping[str, Any], group: dist.ProcessGroup) -> Files:
    """Write with torch's distributed checkpoint (DCP). Collective: every rank of the group.

    Args:
        save: Where to.
        content: Nested dicts and lists with DTensors, and tensors that are the same on every rank.
        group: A group of the ranks that save, with a CPU backend.

    Returns:
        This rank's files; on the group's first rank ``.metadata``, too.

    Raises:
        CheckpointError: It could not be written; raised on every rank.
    """
    writer = _Writer(save.temporary, save.target)
    try:
        with as_checkpoint_error(save.target), naming_lost_ranks("ranks wrote a checkpoint"):
            save_distributed(
                dict(content), storage_writer=writer, planner=NestedSavePlanner(save.rank == 0), process_group=group
            )
    except CheckpointException as error:  # what failed on other ranks, too
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


class _SummingFiles(FileSystem):
    """Takes the checksum of every file that is written through it."""

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
    """Tells the error of the operating system before it travels: what lies behind an error is lost on the way."""

    def __init__(self, path: Path, target: Path) -> None:
        super().__init__(path)
        self._target = target
        self.fs = self.files = _SummingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with as_checkpoint_error(self._target):
            return super().write_data(plan, planner)
