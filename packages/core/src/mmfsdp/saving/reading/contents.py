"""Reads a checkpoint into its content, on one rank or on all; tensors stay on disk until they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.disk import checkpoint_path, permission_errors
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.formats.registry import format_of
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import leaves, map_leaves, usual_content, usual_optimizer
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks, same_path, scatter_objects, shared
from mmfsdp.errors import FormatError
from mmfsdp.saving.reading.content import restricted_load, stored_content
from mmfsdp.saving.reading.locations import is_rule
from mmfsdp.saving.reading.source import Source, lazy_tensors
from mmfsdp.state.lazy_tensors import LazyTensor, locate, whole_box, whole_value

__all__ = ["check_shared", "open_shared", "open_weights", "read_checkpoint", "read_now", "read_verified", "read_whole"]


def read_checkpoint(
    path: str | Path,
    *,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's content with its weights and optimizer state still on disk. Not collective.

    Args:
        path: See `load_checkpoint`.
        verify: See `load_checkpoint`.
        safe_globals: Classes that the file's pickle may hold besides tensors, plain data and numpy's arrays of numbers.
        reference: See `mmfsdp.checkpoint.open_layout`.

    Returns:
        The nested content, with the weights under ``'state_dict'`` and the optimizer's state under ``'optimizer'``,
        whichever of the usual names the checkpoint has for them. Tensors of a ``.pth`` file are memory-mapped, and not
        compared with their checksums (see `read_verified`). Other tensors are lazy
        (`mmfsdp.state.lazy_tensors.LazyTensor`); the loading functions accept them as they are.

    Raises:
        CheckpointNotFoundError: Nothing is at ``path``.
        IncompleteCheckpointError: A rank's file or a part of a tensor is missing.
        CorruptCheckpointError: A file is damaged, or differs from what the manifest lists.
        UnsafePickleError: The pickle holds classes that are neither safe nor in ``safe_globals``.
        FormatError: ``path`` is not a checkpoint of a known format.
    """
    source = _opened(checkpoint_path(path).absolute(), lambda: reference, verify)
    if _is_mappable(source):
        return _mapped(source.path, safe_globals)
    return _content(source, safe_globals)


def read_verified(
    path: str | Path,
    scope: Scope,
    *,
    safe_globals: Iterable[Any] = (),
    reference: Callable[[], str | Path | Layout | None] = lambda: None,
) -> dict[str, Any]:
    """Return what `read_checkpoint` returns, once the ranks have verified all data together. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that read.
        safe_globals: See `load_checkpoint`.
        reference: Returns what `read_checkpoint` takes; not called for a ``.pth`` file.

    Raises:
        RankMismatchError: Ranks gave different paths.
        CheckpointError: See `read_checkpoint`; raised on every rank.
    """
    source, is_mappable = check_shared(path, scope)

    def read() -> dict[str, Any]:
        source.check_unchanged()
        if is_mappable:
            return _mapped(source.path, safe_globals)
        return read_checkpoint(source.path, safe_globals=safe_globals, reference=reference())

    return on_all_ranks(read, scope)


def check_shared(path: str | Path, scope: Scope) -> tuple[Source, bool]:
    """Compare all of a checkpoint's data with its checksums, each rank a part of it. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that check.

    Returns:
        The checkpoint that was opened, and whether torch can map it into memory.

    Raises:
        CheckpointError: The checkpoint is damaged or cannot be read; raised on every rank.
    """
    target = checkpoint_path(same_path(path, scope))

    def first() -> tuple[Source, bool]:
        source = _opened(target, lambda: None, True)
        return source, _is_mappable(source)

    source, is_mappable = shared(lambda: first() if scope.is_first else None, scope)
    own = scatter_objects(scope, source.parts(scope.size) if scope.is_first else None)
    on_all_ranks(lambda: source.check(own), scope)
    return source, is_mappable


def open_shared(
    path: str | Path,
    scope: Scope,
    *,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: Callable[[], str | Path | Layout | None] = lambda: None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content,
    lazy: Collection[str] = (),
) -> tuple[Source, dict[str, Any]]:
    """Return what `read_checkpoint` returns on every rank; only the first rank reads it. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that load.
        verify: See `load_checkpoint`.
        safe_globals: See `load_checkpoint`.
        reference: Returns what `read_checkpoint` takes; called on the ranks that open the checkpoint.
        change: Called on the first rank with the content; every rank receives what it returns.
        lazy: More keys of the content whose tensors stay on disk.

    Returns:
        The source that the tensors are read from, and the content.

    Raises:
        RankMismatchError: Ranks gave different paths.
        CheckpointError: See `read_checkpoint`; raised on every rank.
    """
    return _shared(
        path,
        scope,
        lambda found: _opener(found, reference),
        lambda source: change(_content(source, safe_globals, lazy)),
        verify,
    )


def open_weights(
    path: str | os.PathLike[str],
    scope: Scope,
    *,
    verify: bool = True,
    reference: Callable[[], str | Path | Layout | None] = lambda: None,
    rewrite: Callable[[Layout], Layout],
    change: Callable[[Source], dict[str, LazyTensor]],
) -> tuple[Source, dict[str, LazyTensor]]:
    """Return a checkpoint's weights alone, on every rank, all of them lazy. Collective: every rank.

    No pickled object is made.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that load.
        verify: See `load_checkpoint`.
        reference: See `open_shared`.
        rewrite: Returns the layout of the weights, by name, from the checkpoint's. It is called on the ranks that
            open the checkpoint.
        change: Called on the first rank with the open checkpoint; every rank receives what it returns.

    Returns:
        The source that the weights are read from, and what ``change`` returned.

    Raises:
        RankMismatchError: Ranks gave different paths.
        CheckpointError: The checkpoint cannot be read; raised on every rank.
    """
    return _shared(
        path,
        scope,
        lambda found: lambda: rewrite(_opener(found, reference)()),
        change,
        verify,
    )


def _shared(
    path: str | os.PathLike[str],
    scope: Scope,
    opener: Callable[[Path], Callable[[], Layout]],
    read: Callable[[Source], dict[str, Any]],
    verify: bool,
) -> tuple[Source, dict[str, Any]]:
    target = checkpoint_path(same_path(path, scope))

    def first() -> tuple[Source, dict[str, Any]]:
        source = _found(target, opener, verify)
        content = read(source)
        source.share()
        return source, content

    source, content = shared(lambda: first() if scope.is_first else None, scope)
    source.attach(opener(source.path))
    on_all_ranks(source.check_unchanged, scope)
    return source, content


def read_whole(content: Any, scope: Scope) -> Any:
    """Return content with its tensors read whole into CPU memory. Collective: every rank of the scope.

    Args:
        content: What `read_checkpoint` or `open_shared` returned, or a part of it. Not changed.
        scope: The ranks that read.

    Raises:
        CheckpointError: A rank cannot read a tensor; raised on every rank.
    """
    stored = [leaf for _, leaf in leaves(content) if isinstance(leaf, LazyTensor)]
    locate([(value, whole_box(value)) for value in stored], scope)
    return on_all_ranks(lambda: read_now(content), scope)


def _opened(path: Path, reference: Callable[[], str | Path | Layout | None], verify: bool) -> Source:
    return _found(path, lambda found: _opener(found, reference), verify)


def _found(path: Path, opener: Callable[[Path], Callable[[], Layout]], verify: bool) -> Source:
    with permission_errors(path):
        found = interrupted(path) or path  # a save that was killed may have left the checkpoint beside its path
        return Source(found, opener(found), verify=verify)


def _opener(path: Path, reference: Callable[[], str | Path | Layout | None]) -> Callable[[], Layout]:
    # torch's own restricted loader, with the caller's list, decides which classes a pickle may name.
    return lambda: open_layout(path, trust=True, reference=reference(), look_up=False)


def _content(source: Source, safe_globals: Iterable[Any], lazy: Collection[str] = ()) -> dict[str, Any]:
    layout = source.layout
    kind = format_of(layout)
    if kind.tensors_only:
        return {"state_dict": dict(lazy_tensors(source))}
    if not any(map(is_rule, layout.tensors.values())):  # otherwise the rank that opens a file compares its size
        kind.check_files(layout)
    return _named(stored_content(source, safe_globals), layout.path, lazy)


def _is_mappable(source: Source) -> bool:
    return format_of(source.layout).mapped_file(source.layout) is not None and not is_remote(source.path)


def _mapped(path: Path, safe_globals: Iterable[Any]) -> dict[str, Any]:
    return _named(restricted_load(path, str(path), safe_globals), path)


def _named(content: Any, path: Path, lazy: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise FormatError(f"{path.name} holds a {type(content).__name__}, not a state dict.", file=str(path))
    content = usual_content(content, _is_tensor) or usual_optimizer(content)
    return {key: value if key in lazy or _stays_on_disk(key) else read_now(value) for key, value in content.items()}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, LazyTensor | torch.Tensor)


def _stays_on_disk(key: str) -> bool:
    return key == "optimizer" or str(key).endswith("state_dict")


def read_now(value: Any) -> Any:
    """Return content with its tensors read whole into CPU memory. Not collective."""
    return map_leaves(value, lambda _, leaf: whole_value(leaf))
