"""Files of ranks on the disks of nodes: which exist, which nodes keep copies, and which must be sent."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.errors import RunDirectoryError

__all__ = [
    "Newest",
    "NodeFile",
    "Transfer",
    "choose",
    "holders",
    "path_of",
    "plan_transfers",
    "remove_others",
    "scan",
]


@dataclass(frozen=True)
class NodeFile:
    """What is known of a rank's file of a step; it is written beside the file, after it."""

    step: int
    owner: int
    """The rank that saved this part."""
    ranks: int
    """How many ranks saved."""
    save_id: str
    """The same for all files of a save."""
    model: str
    """Identifies the names and shapes of the model."""
    run: str | None
    """The name of the run."""
    size: int
    crc32: int

    def path(self, directory: Path) -> Path:
        """Return where the file is in a node's directory."""
        return path_of(directory, self.owner, self.step)

    def describe(self, directory: Path) -> None:
        """Write this beside the file, which makes the file count."""
        with atomic_output(self.path(directory).with_suffix(".json"), overwrite=True) as temporary:
            temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")


def path_of(directory: Path, owner: int, step: int) -> Path:
    """Return where a rank's file of a step is in a node's directory."""
    return directory / f"rank{owner}" / f"step_{step}.pth"


def scan(directory: Path, *, model: str, run: str | None) -> list[NodeFile]:
    """Return the whole files in a node's directory. Not collective.

    Raises:
        RunDirectoryError: They belong to another run or model.
    """
    found = []
    for description in sorted(directory.glob("rank*/step_*.json")):
        try:
            file = NodeFile(**json.loads(description.read_text(encoding="utf-8")))
            is_whole = file.path(directory).stat().st_size == file.size
        except (OSError, ValueError, TypeError):
            continue  # it was being written, or removed
        if file.model != model or (None not in (file.run, run) and file.run != run):
            raise RunDirectoryError(
                f"The directory on host {os.uname().nodename!r} holds checkpoints of run {file.run!r} or of another "
                "model. Choose another directory for this run.",
                file=str(directory),
            )
        if is_whole:
            found.append(file)
    return found


def holders(nodes: Sequence[str]) -> list[int | None]:
    """Return for each rank the rank that keeps the copy of its file: one on the next node, or ``None`` on one node.

    Args:
        nodes: The node of each rank, in the order of the mesh.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    groups = list(members.values())
    found: list[int | None] = [None] * len(nodes)
    if len(groups) > 1:
        for own, following in zip(groups, [*groups[1:], groups[0]], strict=True):
            for index, rank in enumerate(own):
                found[rank] = following[index % len(following)]
    return found


@dataclass(frozen=True)
class Newest:
    """The newest step that the nodes have whole together."""

    step: int
    ranks: int
    """How many ranks saved it."""
    holders: Mapping[int, Sequence[int]]
    """For each of these ranks, the present ranks on whose nodes its file is."""


def choose(reports: Sequence[Sequence[NodeFile]]) -> Newest | None:
    """Return the newest step that has the file of every rank that saved it on some node; ``None`` without one.

    Args:
        reports: For each present rank, the files on its node.
    """
    saves: dict[tuple[int, str, int], dict[int, list[int]]] = {}
    for rank, files in enumerate(reports):
        for file in files:
            key = file.step, file.save_id, file.ranks
            saves.setdefault(key, {}).setdefault(file.owner, []).append(rank)
    for (step, _, ranks), holders in sorted(saves.items(), reverse=True):
        if len(holders) == ranks:
            return Newest(step, ranks, dict(sorted(holders.items())))
    return None


Transfer = tuple[int, int, int]
"""The rank that sends a file, the one that receives it, and the rank that saved it."""


def plan_transfers(newest: Newest, needs: Sequence[Collection[int]], nodes: Sequence[str]) -> list[Transfer]:
    """Return what must be sent so that every node has the files that its ranks need; each file goes to a node once.

    Args:
        newest: The step.
        needs: For each present rank, the ranks whose files it needs.
        nodes: The node of each present rank.
    """
    there = {(nodes[rank], owner) for owner, ranks in newest.holders.items() for rank in ranks}
    planned = []
    for rank, owners in enumerate(needs):
        for owner in sorted(owners):
            if (nodes[rank], owner) not in there:
                there.add((nodes[rank], owner))
                holders = newest.holders[owner]
                planned.append((holders[rank % len(holders)], rank, owner))
    return planned


def remove_others(directory: Path, kept: Collection[int]) -> None:
    """Remove files of other steps, and what killed saves have left. Not collective; no save may be running."""
    for folder in directory.glob("rank*"):
        for path in folder.iterdir():
            match = re.fullmatch(r"step_(\d+)\.(?:json|pth)", path.name)
            if match is None or int(match[1]) not in kept:
                with contextlib.suppress(FileNotFoundError):  # another rank of this node is at it, too
                    path.unlink()
