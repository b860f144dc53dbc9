"""Writes one file with whole tensors from all ranks, or by the first one where the others do not see it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.checkpoint.files.disk import make_parent
from mmfsdp.checkpoint.layout import PlannedFile
from mmfsdp.checkpoint.manifest import BLOCK
from mmfsdp.checkpoint.tree import find_leaves, map_leaves
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, on_all_ranks, shared
from mmfsdp.runtime.dtensors import is_box
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.directory.store import Store
from mmfsdp.saving.writing.archives import Placeholders, plan_live
from mmfsdp.saving.writing.embedded_sums import embed_sums
from mmfsdp.saving.writing.memory import live_entry
from mmfsdp.saving.writing.pieces import Share
from mmfsdp.saving.writing.publishing import sees
from mmfsdp.saving.writing.shared_files import shares_of, write_shared
from mmfsdp.state.model import whole as gather

__all__ = ["publish_file", "with_boxes", "write_whole"]


def with_boxes(content: Mapping[str, Any], scope: Scope, target: Path) -> dict[str, Any]:
    """Return content in which each shard is a box of its tensor. Collective: every rank of the scope.

    Other tensors, such as those of tensor parallelism below FSDP, are gathered at once over their own mesh.

    Args:
        content: Nested dicts and lists, with DTensors where tensors are sharded. Not changed.
        scope: The ranks that save. The first one keeps the gathered tensors; others get tensors without memory.
        target: What is saved, for messages.

    Raises:
        FormatError: The content holds itself; raised on every rank.
    """

    def odd() -> set[str]:  # the keys with other tensors; what is under all others stays as it is
        with as_checkpoint_error(target):
            return {
                key
                for key, value in content.items()
                if not all(is_box(leaf) for _, leaf in find_leaves({key: value}, DTensor))
            }

    def gathered(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor) or is_box(leaf):
            return leaf
        value = gather(leaf, scope.is_first)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if value is None else value

    keys = on_all_ranks(odd, scope)
    return {key: map_leaves({key: value}, gathered)[key] if key in keys else value for key, value in content.items()}


def write_whole(target: Path, content: Mapping[str, Any], scope: Scope, *, overwrite: bool) -> None:
    """Write one file with whole tensors, as ``torch.save`` would. Collective: every rank.

    Ranks that see the file write their shards into it. Otherwise, and for a store, the first one writes what the others
    send; it holds one shard of another rank at a time.

    Args:
        target: The file.
        content: What `with_boxes` returned; what is not a DTensor is taken from the first rank.
        scope: The ranks that save; its channel is one of gloo.
        overwrite: Replace what is there.

    Raises:
        CheckpointError: The file cannot be written; raised on every rank.
        LostRankError: A rank is gone.
    """
    shards = dict(find_leaves(dict(content), DTensor))

    def plan() -> tuple[list[PlannedFile], dict[str, Share]]:
        with as_checkpoint_error(target):
            return ([_planned(content)] if scope.is_first else []), shares_of(shards, scope)

    planned, shares = on_all_ranks(plan, scope)
    publish_file(target, planned, shares, scope, overwrite=overwrite, sums=True)


def publish_file(
    target: Path,
    planned: Sequence[PlannedFile],
    shares: Mapping[str, Share],
    scope: Scope,
    *,
    overwrite: bool,
    sums: bool = False,
) -> None:
    """Write one planned file, which appears whole. Collective: every rank of the scope.

    Args:
        target: The file.
        planned: On the first rank: the plan.
        shares: What this rank holds of each live tensor.
        scope: The ranks that save; its channel is one of gloo.
        overwrite: Replace what is there.
        sums: Add checksums of blocks to an archive of torch.

    Raises:
        CheckpointError: The file cannot be written; raised on every rank.
        LostRankError: A rank is gone.
    """
    with ExitStack() as stack:  # of the first rank; the others see its file, or not

        def begin() -> Path | None:
            if not scope.is_first:
                return None
            with as_checkpoint_error(target):
                temporary = stack.enter_context(_published(target, overwrite))
                temporary.touch()
                return temporary

        temporary = shared(begin, scope)
        alone = is_remote(target) or any_of(scope, not sees(temporary))
        files = [replace(file, name=temporary.name) for file in planned]
        entries = write_shared(
            temporary.parent,
            files,
            shares,
            scope,
            target=target,
            border=BLOCK if sums else 0,
            alone=alone,
        )

        def publish() -> None:
            with as_checkpoint_error(target):
                for name, entry in entries.items() if sums else ():
                    embed_sums(temporary.parent / name, entry)
                stack.close()

        on_all_ranks(publish, scope)


@contextmanager
def _published(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yield where to write a file that appears at the target if the block succeeds."""
    if not is_remote(target):
        make_parent(target)
        with atomic_output(target, overwrite=overwrite) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory(prefix="mmfsdp-") as folder:
        yield Path(folder, target.name)
        Store(target.parent).send(Path(folder, target.name), target.name)


def _planned(content: Mapping[str, Any]) -> PlannedFile:
    """Plan the file. Names that share the memory of a shard, such as tied weights, share bytes of the file."""
    placeholders = Placeholders()

    def whole(path: str, leaf: Any) -> Any:
        is_shard = isinstance(leaf, DTensor)
        return placeholders.of(leaf.to_local(), leaf.shape, live_entry(path, leaf)) if is_shard else leaf

    keys = [key for key, value in content.items() if find_leaves(value, DTensor)]  # others keep the types they have
    mapped = {key: map_leaves({key: value}, whole)[key] if key in keys else value for key, value in content.items()}
    return plan_live(mapped, placeholders.entries).as_file("")
