"""Saves a sharded model from all its ranks; a checkpoint appears complete or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.atomic import atomic_output, refuse_existing, refuse_other_content
from mmfsdp.checkpoint.files.disk import make_parent, place
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks, same_path
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.directory.store import check_store
from mmfsdp.saving.writing.archives import write_rank_file, write_whole
from mmfsdp.saving.writing.background import PendingSave, own_copy, saver_of, settle_saves
from mmfsdp.saving.writing.gathering import WriteFile, with_boxes, write_gathered
from mmfsdp.saving.writing.model_folder import ModelFolder, write_model_folder
from mmfsdp.saving.writing.publishing import DirectorySave
from mmfsdp.saving.writing.store_save import StoreSave, refuse_in_store, send_whole
from mmfsdp.saving.writing.torch_dcp import write_distributed
from mmfsdp.state.model import model_state_dict
from mmfsdp.state.optimizers.plain import optim_state_dict

__all__ = ["save_checkpoint", "write_checkpoint"]

Kind = Literal["full", "local", "sharded"]
SaveKind = Literal["full", "local", "sharded", "hf"]
_FILES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    kind: SaveKind = "sharded",
    extra: Mapping[str, Any] | None = None,
    like: str | Path | None = None,
    overwrite: bool = False,
    blocking: bool = True,
) -> PendingSave:
    """Save a sharded model, and its optimizer. Collective: every rank.

    Args:
        path: ``sharded``, ``local`` and ``hf``: a directory. ``full``: one ``.pth`` file that plain PyTorch loads. The
            same on every rank. Missing parent directories are created. All but ``hf`` may be URLs in a store, such as
            ``s3://bucket/run/step_8``: each rank writes its files into a temporary directory, and sends them.
        model: A sharded model.
        optimizer: Built from its parameters.
        kind: ``sharded``: each rank writes its own part, in the format of torch's distributed checkpoint (DCP), with
            optimizer state by parameter name. ``local``: one file per rank. ``full``: the first rank gathers the whole
            model, needs memory for it, and writes it alone. ``hf``: a folder that ``from_pretrained`` of transformers
            loads, with the weights alone; each rank writes its own rows into the files.
        extra: More content beside ``state_dict`` and ``optimizer``, the same on every rank.
        like: For ``hf``: a Hugging Face folder of the same model, whose configuration and tokenizer files are copied.
            If it has weights, their names and shapes must be the model's; those of a model of transformers 5 are
            written as its files have them.
        overwrite: Replace the checkpoint at ``path`` once the new one is complete.
        blocking: ``False``: return as soon as each rank has copied its part to CPU memory, and write in the background
            while training continues. The memory is kept for the next save, which first waits for this one. For
            ``full`` the first rank gathers the copies meanwhile.

    Returns:
        The save. Its ``result()`` waits until the checkpoint is complete, and raises if writing failed. With
        ``blocking`` the save is complete already. A save in the background that fails is logged at once; a process that
        ends without asking for its result exits with code 120.

    Raises:
        TargetExistsError: Something is at ``path``, and ``overwrite`` is False; raised on every rank before anything
            is gathered.
        CheckpointError: The checkpoint, or the one before it in the background, could not be written; raised on every
            rank; or the directory to replace also holds what is not part of a checkpoint, such as another directory.
            What was at ``path`` is untouched.
        RankMismatchError: Ranks gave different paths or other arguments; raised before anything is gathered.
        ConfigError: ``kind`` is unknown, or does not fit the path or another argument; or ``like`` does not fit the
            model.
    """
    state, scope = _savers(model)
    target = _agreed_target(path, scope, "save_checkpoint()", kind, optimizer, overwrite, blocking)
    _check_kind(kind, ("full", "local", "sharded", "hf"))
    if (kind == "hf") != (like is not None):
        raise ConfigError(
            "kind='hf' needs like=FOLDER, a Hugging Face folder of the same model, for its config.json and tokenizer."
            if like is None
            else f"like={str(like)!r} applies only to kind='hf', not to kind={kind!r}."
        )
    if like is not None and (optimizer is not None or extra):
        raise ConfigError(
            f"kind='hf' holds the weights alone. Leave out {'the optimizer' if optimizer is not None else 'extra'}, "
            "and save kind='sharded' beside it to resume from."
        )
    if kind != "full" and target.suffix in _FILES:
        raise ConfigError(
            f"A checkpoint of kind {kind!r} is a directory, and {str(path)!r} is named like a file. Leave out "
            f"{target.suffix!r}, or pass kind='full' for one file that plain PyTorch loads."
        )
    extra = dict(extra or {})
    if taken := [key for key in ("state_dict", "optimizer", "mmfsdp") if key in extra]:
        raise ConfigError(f"extra holds {taken[0]!r}, which save_checkpoint() writes itself. Choose another key.")
    _make_free(target, state, scope, overwrite)
    if overwrite and like is None and not is_remote(target):  # a model's folder keeps what else is there
        on_all_ranks(lambda: refuse_other_content(target) if scope.is_first else None, scope)
    if like is not None:
        weights = model_state_dict(model, "sharded")
        folder_like = Path(same_path(like, scope))
        folder = ModelFolder.of(weights, folder_like, target, scope, overwrite=overwrite, model=state.module)
        return _write_folder(target, folder, state, scope, overwrite, blocking)
    form: Literal["full", "sharded"] = "full" if kind == "full" and blocking else "sharded"
    content: dict[str, Any] = {"state_dict": model_state_dict(model, form)}
    if optimizer is not None:
        by_name = kind == "sharded"
        content["optimizer"] = optim_state_dict(model, optimizer, form, by_name=by_name, param_names=True)
    assert kind != "hf"
    return _write(target, {**content, **extra}, state, scope, kind, overwrite, blocking)


def write_checkpoint(
    path: str | Path,
    content: Mapping[str, Any],
    model: nn.Module,
    *,
    kind: Kind = "full",
    overwrite: bool = True,
    blocking: bool = True,
) -> PendingSave:
    """Write content that the caller has gathered. Collective: every rank of the model's mesh.

    Args:
        path: A ``.pth`` file for ``full``, a directory for ``local`` and ``sharded``.
        content: Nested dicts and lists. ``full``: with whole tensors; only the first rank's is written. ``local``:
            each rank's own content, with DTensors where tensors are sharded; each rank's file holds the local tensors
            and, under ``'mmfsdp'``, the box of the whole tensor that each one is. ``sharded``: each rank's own content,
            too; values other than DTensors are taken from the first rank, and all dict keys that lead to a DTensor must
            be strings or integers.
        model: The sharded model, whose mesh says which ranks take part.
        kind: ``full``, ``local`` or ``sharded``.
        overwrite: Replace what is at ``path`` once the new checkpoint is complete.
        blocking: See `save_checkpoint`.

    Returns:
        See `save_checkpoint`.

    Raises:
        MmfsdpError: See `save_checkpoint`.
    """
    state, scope = _savers(model)
    target = _agreed_target(path, scope, "write_checkpoint()", kind, None, overwrite, blocking)
    _check_kind(kind)
    _make_free(target, state, scope, overwrite)
    return _write(target, content, state, scope, kind, overwrite, blocking)


def _savers(model: nn.Module) -> tuple[ShardedModel, Scope]:
    """Return a model's state, settled, and the ranks that save it together. Collective: every rank."""
    state = find_sharded_model(model)
    state.settle()
    return state, state.scope


def _agreed_target(
    path: str | Path,
    scope: Scope,
    call: str,
    kind: str,
    optimizer: Optimizer | None,
    overwrite: bool,
    blocking: bool,
) -> Path:
    """Return the path once all ranks agree on it and on what else decides their steps. Collective: every rank."""
    target = place(same_path(path, scope))
    check_store(target, kind)
    saved = None if optimizer is None else type(optimizer).__name__
    given = {"kind": kind, "optimizer": saved, "overwrite": overwrite, "blocking": blocking}
    check_same_arguments(scope, call, given)
    return target


def _make_free(target: Path, state: ShardedModel, scope: Scope, overwrite: bool) -> None:
    """Wait until the save before is over, and check that nothing is at the target. Collective: every rank."""
    settle_saves(state.mesh)

    def check() -> None:
        if scope.is_first and is_remote(target):
            refuse_in_store(target, overwrite=overwrite)
        elif scope.is_first and not overwrite:
            refuse_existing(target)

    on_all_ranks(check, scope)


def _write(
    target: Path,
    content: Mapping[str, Any],
    state: ShardedModel,
    scope: Scope,
    kind: Kind,
    overwrite: bool,
    blocking: bool,
) -> PendingSave:
    if kind == "full" and blocking:
        on_all_ranks(lambda: _write_full(target, content, overwrite) if scope.is_first else None, scope)
        return PendingSave.over()
    if kind == "local" and blocking:
        save = _begin(target, scope, overwrite)
        save.finish(lambda save: write_rank_file(save, content, state.mesh), scope)
        return PendingSave.over()
    # Training uses the model's groups meanwhile.
    saver = saver_of(state.mesh)
    scope = saver.scope
    if kind == "full":
        content = with_boxes(content, rows_only=False, is_first=scope.is_first)
    kept = own_copy(dict(content), saver, target) if not blocking else dict(content)
    if kind == "full":

        def gather() -> None:
            write_gathered(kept, saver.group, scope, lambda write: _publish(target, write, overwrite))

        return saver.start(gather, target)
    save = _begin(target, scope, overwrite)

    def step() -> None:
        if kind == "local":
            save.finish(lambda save: write_rank_file(save, kept, state.mesh, direct=True), scope)
        else:
            save.finish(lambda save: write_distributed(save, kept, saver.group, direct=not blocking), scope)

    if not blocking:
        return saver.start(step, target)
    step()
    return PendingSave.over()


def _write_folder(
    target: Path, folder: ModelFolder, state: ShardedModel, scope: Scope, overwrite: bool, blocking: bool
) -> PendingSave:
    saver = None if blocking else saver_of(state.mesh)
    if saver is not None:
        scope = saver.scope
        weights = with_boxes(folder.weights, rows_only=True, is_first=scope.is_first)
        folder = replace(folder, weights=own_copy(weights, saver, target))
    save = DirectorySave.begin(target, scope, overwrite=overwrite)

    def step() -> None:
        save.finish(lambda save: write_model_folder(save, folder, scope, direct=not blocking), scope)

    if saver is not None:
        return saver.start(step, target)
    step()
    return PendingSave.over()


def _begin(target: Path, scope: Scope, overwrite: bool) -> DirectorySave:
    kind = StoreSave if is_remote(target) else DirectorySave
    return kind.begin(target, scope, overwrite=overwrite)


def _check_kind(kind: str, known: tuple[str, ...] = ("full", "local", "sharded")) -> None:
    if kind not in known:
        raise ConfigError(f"kind must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {kind!r}.")


def _write_full(target: Path, content: Mapping[str, Any], overwrite: bool) -> None:
    def check(path: str, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            raise StateDictError(
                f"{path!r} is a shard, but kind='full' needs whole tensors. Gather it, or save with kind='sharded'.",
                file=str(target),
            )
        return leaf

    with as_checkpoint_error(target):
        map_leaves(dict(content), check)
    _publish(target, lambda file: write_whole(content, file), overwrite)


def _publish(target: Path, write: WriteFile, overwrite: bool) -> None:
    with as_checkpoint_error(target):
        if is_remote(target):
            send_whole(target, write)
            return
        make_parent(target)
        with atomic_output(target, overwrite=overwrite) as temporary:
            write(temporary)
