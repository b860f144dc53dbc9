"""Frequent checkpoints on each node's own disk or in its memory, with a copy of each rank's file on another node."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.checkpoint.files.siblings import Lease
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.collective.channels import host_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import broadcast_object, gather_objects, gather_to_first, on_all_ranks, shared
from mmfsdp.runtime.ranks.model_axes import check_equal
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.directory.disk import take_lease
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.directory.record import identity_of
from mmfsdp.saving.nodes.copies import exchange_copies, transfer
from mmfsdp.saving.nodes.files import (
    Newest,
    NodeFile,
    choose,
    holders,
    path_of,
    plan_transfers,
    remove_others,
    scan,
)
from mmfsdp.saving.nodes.shards import NodeShards, boxes_of_rank, header_of, needed_owners
from mmfsdp.saving.writing.archives import write_own_part
from mmfsdp.saving.writing.background import PendingSave, own_copy, saver_of, settle_saves
from mmfsdp.state.model import model_state_dict

__all__ = ["NodeTier"]

_log = logging.getLogger("mmfsdp.saving")


class NodeTier:
    """The checkpoints of a run on the nodes' own disks. Making one and all methods but `close` are collective.

    Each rank writes all that it holds into one file, and sends it to a rank of the next node, in the order of the mesh,
    which keeps the copy. The newest step is kept, and the one before until all ranks have the new one.

    Args:
        directory: A directory on each node, such as one of its own disk or of ``/dev/shm``; the same path everywhere.
        model: The sharded model, whose mesh lists the ranks.
        scope: The same ranks, to exchange messages.
        run: The name of the run, or ``None`` for any.

    Raises:
        RunDirectoryError: A directory belongs to another run or model, or another job uses it; raised on every rank.
    """

    def __init__(self, directory: Path, model: nn.Module, scope: Scope, *, run: str | None) -> None:
        state = find_sharded_model(model)
        self._directory, self._state, self._scope = directory, state, scope
        self._model = identity_of((param.fqn, param.shape) for param in state.plan.all_params())
        self._run = run
        self._leases: list[Lease] = []
        self._found: Newest | None = None

        def open_directory() -> None:
            with as_checkpoint_error(directory):
                (directory / f"rank{scope.rank}").mkdir(parents=True, exist_ok=True)
                self._leases.append(take_lease(directory / f".rank{scope.rank}.mmfsdp-run-lease"))
                scan(directory, model=self._model, run=run)

        self._nodes = nodes = gather_objects(scope, host_of())
        self._holders = holders(nodes)
        try:
            on_all_ranks(open_directory, scope)
        except BaseException:
            self.close()
            raise
        if scope.is_first and scope.size > 1 and self._holders[0] is None:
            _log.warning("All ranks run on host %r: no other node can keep copies of their files.", nodes[0])

    def close(self) -> None:
        """Let other jobs use the directory. Not collective."""
        for lease in self._leases:
            lease.release()
        self._leases = []

    def save(self, step: int, content: Mapping[str, Any]) -> PendingSave:
        """Save in the background. Collective: every rank.

        Args:
            step: How many steps are done.
            content: Nested dicts and lists, with DTensors of the mesh where tensors are sharded; weights under
                ``state_dict``. What is not sharded each rank gets back from the file of one of them.

        Raises:
            CheckpointError: The save before failed, or the content cannot be copied.
        """
        settle_saves(self._state.mesh)
        check_equal(self._state)
        saver = saver_of(self._state.mesh)
        kept = own_copy(dict(content), saver, self._directory)
        save_id = shared(lambda: secrets.token_hex(8) if self._scope.is_first else None, saver.scope)
        return saver.start(lambda: self._write(step, save_id, kept, saver.scope, saver.group), self._directory)

    def clear(self) -> None:
        """Remove what runs before have left. Collective: every rank.

        Raises:
            CheckpointError: Something cannot be removed; raised on every rank.
        """

        def remove() -> None:
            with as_checkpoint_error(self._directory):
                remove_others(self._directory, set())

        on_all_ranks(remove, self._scope)

    def newest(self, after: int = 0) -> int | None:
        """Find the newest step that the nodes have together, whatever the number of ranks that saved it. Collective.

        Args:
            after: Only a step after this one.

        Raises:
            CheckpointError: A directory cannot be read; raised on every rank.
        """
        files = on_all_ranks(self._own_files, self._scope)
        reports = gather_to_first(self._scope, files)
        self._found = shared(lambda: None if reports is None else choose(reports), self._scope)
        return None if self._found is None or self._found.step <= after else self._found.step

    def read(
        self, model: nn.Module, safe_globals: Sequence[Any], *, rows: str, change: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Return the content of the step that `newest` found; its shards stay on disk. Collective: every rank.

        A rank reads its part from the files on its node. Those that its node lacks come from others first.

        Args:
            model: The sharded model, with the weights where they were when it was saved, or elsewhere.
            safe_globals: Classes that the content may hold besides tensors and plain data.
            rows: Prefix of the names of tensors from which each rank reads only its own row, if as many ranks saved.
            change: Called on each rank with the content; its errors are raised on all.

        Returns:
            What ``change`` returned.

        Raises:
            CheckpointError: A file cannot be read; raised on every rank.
        """
        found = self._found
        assert found is not None
        own, needs = self._bring(found, model, rows)

        def read() -> dict[str, Any]:
            with as_checkpoint_error(self._directory):
                paths = {owner: path_of(self._directory, owner, found.step) for owner in needs}
                content = NodeShards(paths, own, safe_globals).content
            result: dict[str, Any] = change(content)
            return result

        return on_all_ranks(read, self._scope)

    def _bring(self, found: Newest, model: nn.Module, rows: str) -> tuple[int, set[int]]:
        """Bring to each node the files that its ranks need. Collective.

        Returns:
            The rank whose file gives this rank everything but shards, and all ranks whose files it needs.
        """
        rank, size = self._scope.rank, self._scope.size
        own = rank * found.ranks // size
        origin = found.holders[0][0]

        def describe() -> dict[str, Any] | None:
            if rank != origin:
                return None
            path = path_of(self._directory, 0, found.step)
            with as_checkpoint_error(path):
                return header_of(path)

        header = broadcast_object(self._scope, on_all_ranks(describe, self._scope), origin=origin)
        assert header is not None
        near = {
            owner
            for owner, ranks in found.holders.items()
            if any(self._nodes[other] == self._nodes[rank] for other in ranks)
        }
        boxes = boxes_of_rank(header, self._state.mesh, model_state_dict(model, "sharded"))
        if found.ranks != size:
            boxes = {path: box for path, box in boxes.items() if not path.startswith(rows)}
        needs = {own, *needed_owners(header, boxes, near)}
        all_needs = gather_to_first(self._scope, needs)
        plan = shared(lambda: None if all_needs is None else plan_transfers(found, all_needs, self._nodes), self._scope)
        saver = saver_of(self._state.mesh)

        def send() -> None:
            with as_checkpoint_error(self._directory):
                transfer(found.step, self._directory, plan, rank, saver.group)

        on_all_ranks(send, self._scope)
        if plan and self._scope.is_first:
            came = sorted({owner for _, _, owner in plan})
            _log.warning("The files of ranks %s of step %d came from other nodes.", came, found.step)
        return own, needs

    def _own_files(self) -> list[NodeFile]:
        with as_checkpoint_error(self._directory):
            found = scan(self._directory, model=self._model, run=self._run)
            return [file for file in found if self._is_mine_to_tell(file)]

    def _is_mine_to_tell(self, file: NodeFile) -> bool:
        """Tell whether this rank reports a file: its own, or one whose rank is on another node; if it is undamaged."""
        if file.ranks == self._scope.size:
            if file.owner == self._scope.rank:
                return self._is_undamaged(file)
            return self._nodes[file.owner] != self._nodes[self._scope.rank]
        # Other ranks saved it, and any of them may be read: the ranks of a node share the checks.
        here = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._scope.rank]]
        return here[file.owner % len(here)] == self._scope.rank and self._is_undamaged(file)

    def _is_undamaged(self, file: NodeFile) -> bool:
        path = file.path(self._directory)
        if FileEntry.of(path).crc32 == file.crc32:
            return True
        _log.warning("%r on host %r is damaged; its copy is used.", str(path), host_of())
        path.with_suffix(".json").unlink()
        return False

    def _write(self, step: int, save_id: str, content: dict[str, Any], scope: Scope, group: dist.ProcessGroup) -> None:
        rank = scope.rank
        sources = [owner for owner, holder in enumerate(self._holders) if holder == rank]
        common = {"step": step, "ranks": scope.size, "save_id": save_id, "model": self._model, "run": self._run}

        def write() -> NodeFile:
            with as_checkpoint_error(self._directory):
                path = path_of(self._directory, rank, step)
                path.parent.mkdir(parents=True, exist_ok=True)  # it may have been lost since the run began
                with atomic_output(path, overwrite=True) as temporary:
                    entry = write_own_part(temporary, content, self._state.mesh, save_id, rank)
                assert entry.crc32 is not None
                return NodeFile(owner=rank, size=entry.size, crc32=entry.crc32, **common)  # type: ignore[arg-type]

        own = on_all_ranks(write, scope)
        files = [own, *exchange_copies(own, self._holders[rank], sources, common, self._directory, scope, group)]

        def finish() -> None:
            with as_checkpoint_error(self._directory):
                for file in files:
                    file.describe(self._directory)

        def tidy() -> None:
            with contextlib.suppress(OSError):  # an old file too many does no harm
                remove_others(self._directory, {step})

        on_all_ranks(finish, scope)
        on_all_ranks(tidy, scope)
