"""Loads a checkpoint of any kind and world size into a sharded model; each rank reads only the bytes it needs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.formats.registry import open_layout
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest
from mmfsdp.checkpoint.tree import leaves, map_leaves, usual_content
from mmfsdp.collective.steps import Scope, on_all_ranks, scatter_objects, scope_of, shared
from mmfsdp.errors import FormatError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.content import restricted_load, stored_content
from mmfsdp.saving.paths import same_path
from mmfsdp.saving.source import Source, lazy_tensors
from mmfsdp.state.lazy_tensors import LazyTensor, locate, whole_box, whole_value
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.named_optimizer import renamed
from mmfsdp.state.optimizer import prepare_optim_load
from mmfsdp.state.report import LoadReport

__all__ = [
    "check_shared",
    "load_checkpoint",
    "open_shared",
    "read_checkpoint",
    "read_verified",
    "read_whole",
    "reference_of",
]

_PREFIX = "module."


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Load a checkpoint of any kind and world size into a sharded model. Collective: every rank.

    The first rank reads the checkpoint's description and tells each rank where its own part lies; each rank reads only
    that. The work of a rank depends on the size of its part, not on the number of ranks.

    Args:
        path: Anything that `mmfsdp.checkpoint.open_layout` reads: what `save_checkpoint` wrote, a ``.pth`` of plain
            PyTorch (weights under ``state_dict`` or ``model``, or bare), a directory of torch's distributed checkpoint,
            safetensors or ``.bin`` files with or without their index, or a ``local`` checkpoint of stock MMEngine. If
            all names begin with ``module.``, that prefix is removed. The same on every rank.
        model: A sharded model.
        optimizer: Built from the model's parameters; its state is loaded if it is given.
        strict: Raise if keys or shapes do not match.
        verify: Compare what is read with the checkpoint's checksums, if it has any. ``False`` saves a little time.
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.
        reference: See `mmfsdp.checkpoint.open_layout`; by default `reference_of` the model.

    Returns:
        The rest of the content, with its tensors read whole into CPU memory; and a report of the keys and shapes that
        did not match.

    Raises:
        CheckpointError: The checkpoint cannot be read, is damaged, or was replaced while it was read; raised on every
            rank.
        RankMismatchError: Ranks gave different paths.
        StateDictError: The checkpoint does not fit the model or the optimizer; raised on every rank, and nothing is
            changed.
    """
    state = find_sharded_model(model)
    scope = scope_of(state.mesh)
    own = [param.fqn for param in state.plan.all_params()]

    def checked(content: dict[str, Any]) -> dict[str, Any]:
        for key, what in (("state_dict", "weights"), ("optimizer", "optimizer state")):
            if key not in content and (key == "state_dict" or optimizer is not None):
                found = name_list(sorted(map(str, content))) or "nothing"
                raise FormatError(f"The checkpoint holds no {what} under {key!r}; it has {found}.", file=str(path))
        return _without_prefix(content, own)

    source, content = open_shared(
        path,
        scope,
        verify=verify,
        safe_globals=safe_globals,
        reference=lambda: reference or reference_of(model),
        change=checked,
    )
    weights = content.pop("state_dict")
    # Check that everything fits before anything is changed.
    finish = prepare_optim_load(model, optimizer, content.pop("optimizer")) if optimizer is not None else None
    report = load_model_state_dict(model, weights, strict=strict)
    if finish is not None:
        finish()
    rest = read_whole(content, scope)
    on_all_ranks(source.check_unchanged, scope)
    return rest, report


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
        safe_globals: Classes that the file's pickle may hold besides tensors and plain data.
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
    source = _opened(Path(os.path.abspath(path)), lambda: reference, verify)
    if source.layout.format == "torch_zip":
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
    source, format = check_shared(path, scope)

    def read() -> dict[str, Any]:
        source.check_unchanged()
        if format == "torch_zip":
            return _mapped(source.path, safe_globals)
        return read_checkpoint(source.path, safe_globals=safe_globals, reference=reference())

    return on_all_ranks(read, scope)


def check_shared(path: str | Path, scope: Scope) -> tuple[Source, str]:
    """Compare all of a checkpoint's data with its checksums, each rank a part of it. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that check.

    Returns:
        The checkpoint that was opened, and its format.

    Raises:
        CheckpointError: The checkpoint is damaged or cannot be read; raised on every rank.
    """
    target = same_path(path, scope)

    def first() -> tuple[Source, str]:
        source = _opened(target, lambda: None, True)
        return source, source.layout.format

    source, format = shared(lambda: first() if scope.is_first else None, scope)
    own = scatter_objects(scope, source.parts(scope.size) if scope.is_first else None)
    on_all_ranks(lambda: source.check(own), scope)
    return source, format


def open_shared(
    path: str | Path,
    scope: Scope,
    *,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: Callable[[], str | Path | Layout | None] = lambda: None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content,
) -> tuple[Source, dict[str, Any]]:
    """Return what `read_checkpoint` returns on every rank; only the first rank reads it. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        scope: The ranks that load.
        verify: See `load_checkpoint`.
        safe_globals: See `load_checkpoint`.
        reference: Returns what `read_checkpoint` takes; called on the ranks that open the checkpoint.
        change: Called on the first rank with the content; every rank receives what it returns.

    Returns:
        The source that the tensors are read from, and the content.

    Raises:
        RankMismatchError: Ranks gave different paths.
        CheckpointError: See `read_checkpoint`; raised on every rank.
    """
    target = same_path(path, scope)

    def first() -> tuple[Source, dict[str, Any]]:
        source = _opened(target, reference, verify)
        content = change(_content(source, safe_globals))
        source.share()
        return source, content

    source, content = shared(lambda: first() if scope.is_first else None, scope)
    source.attach(_opener(source.path, reference))
    on_all_ranks(source.check_unchanged, scope)
    return source, content


def read_whole(content: Any, scope: Scope) -> Any:
    """Return content with its tensors read whole into CPU memory on every rank. Collective."""
    stored = [leaf for _, leaf in leaves(content) if isinstance(leaf, LazyTensor)]
    locate([(value, whole_box(value)) for value in stored], scope)
    return on_all_ranks(lambda: _read_now(content), scope)


def _opened(path: Path, reference: Callable[[], str | Path | Layout | None], verify: bool) -> Source:
    found = interrupted(path) or path  # a save that was killed may have left the checkpoint beside its path
    return Source(found, _opener(found, reference), verify=verify)


def _opener(path: Path, reference: Callable[[], str | Path | Layout | None]) -> Callable[[], Layout]:
    # torch's own restricted loader, with the caller's list, decides which classes a pickle may name.
    return lambda: open_layout(path, trust=True, reference=reference(), look_up=False)


def _content(source: Source, safe_globals: Iterable[Any]) -> dict[str, Any]:
    layout = source.layout
    if layout.format.startswith("safetensors"):
        return {"state_dict": dict(lazy_tensors(source))}
    if layout.format == "dcp" and (layout.path / MANIFEST_NAME).exists():
        # DCP's own metadata cannot distinguish files of two saves; their sizes often can, and cost nothing to check.
        check_manifest(layout.path, checksums=False)
    return _named(stored_content(source, safe_globals), layout.path)


def _mapped(path: Path, safe_globals: Iterable[Any]) -> dict[str, Any]:
    return _named(restricted_load(path, str(path), safe_globals), path)


def _named(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise FormatError(f"{path.name} holds a {type(content).__name__}, not a state dict.", file=str(path))
    content = usual_content(content, _is_tensor) or content
    return {key: value if _stays_on_disk(key) else _read_now(value) for key, value in content.items()}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, LazyTensor | torch.Tensor)


def _stays_on_disk(key: str) -> bool:
    return key == "optimizer" or str(key).endswith("state_dict")


def _read_now(value: Any) -> Any:
    return map_leaves(value, lambda _, leaf: whole_value(leaf))


def _without_prefix(content: dict[str, Any], own: list[str]) -> dict[str, Any]:
    """Return content without the prefix ``module.`` that DistributedDataParallel adds to every name."""
    weights = content["state_dict"]
    if any(name.startswith(_PREFIX) for name in own) or not all(str(name).startswith(_PREFIX) for name in weights):
        return content
    content = {**content, "state_dict": {name.removeprefix(_PREFIX): value for name, value in weights.items()}}
    if isinstance(content.get("optimizer"), dict):
        content["optimizer"] = renamed(content["optimizer"], _PREFIX)
    return content


def reference_of(model: nn.Module) -> Layout:
    """Return a sharded model's own names and shapes, for checkpoints that do not store them. Not collective.

    Weights that may have been in channels-last order when they were saved are left out: their shape does not say in
    which order a flat parameter holds their elements.
    """
    tensors: dict[str, TensorEntry] = {}
    for place, param in enumerate(find_sharded_model(model).plan.all_params()):
        if len(param.shape) in (4, 5) and param.shape[1] > 1 and math.prod(param.shape[2:]) > 1:
            continue
        whole = Chunk(Path("the model"), place, param.nbytes, (0,) * len(param.shape), param.shape)
        for name in (param.fqn, *param.aliases):
            tensors[name] = TensorEntry(name, param.dtype, param.shape, (whole,))
    return Layout(Path("the model"), "model", 1, tensors, {name: TensorRef(name) for name in tensors})
