"""Saves a sharded model from all its ranks; a checkpoint appears complete or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.atomic import refuse_existing, refuse_other_content
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.checkpoint.formats.registry import FORMATS
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks, same_path
from mmfsdp.errors import ConfigError
from mmfsdp.runtime.ranks.model_axes import check_equal
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.saving.directory.store import check_store
from mmfsdp.saving.writing.archives import write_rank_file
from mmfsdp.saving.writing.background import PendingSave, Saver, own_copy, saver_of, settle_saves
from mmfsdp.saving.writing.distributed import write_distributed
from mmfsdp.saving.writing.model_files import ModelFiles, write_model_folder
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.shared_files import shares_of
from mmfsdp.saving.writing.store_save import StoreSave, refuse_in_store
from mmfsdp.saving.writing.whole_files import publish_file, with_boxes, write_whole
from mmfsdp.state.averaged_model import AVERAGES, AveragedModel, check_averages_of
from mmfsdp.state.model import model_state_dict
from mmfsdp.state.optimizers.plain import optim_state_dict

__all__ = ["save_checkpoint", "write_checkpoint"]

Kind = Literal["full", "local", "sharded"]
_KINDS = ("full", "local", "sharded")
_MODELS = {(item.aliases or (item.name,))[0]: item for item in FORMATS if item.tensors_only and item.writes}
"""The formats of weights alone, for other libraries, by the kinds that ask for them."""
_LIKE = " and ".join(f"kind={kind!r}" for kind, item in _MODELS.items() if item.like)
_FILES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".gguf")


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averaged: AveragedModel | None = None,
    kind: str = "sharded",
    extra: Mapping[str, Any] | None = None,
    like: str | Path | None = None,
    overwrite: bool = False,
    blocking: bool = True,
) -> PendingSave:
    """Save a sharded model, and its optimizer. Collective: every rank.

    Args:
        path: ``sharded``, ``local`` and ``hf``: a directory. ``full``, ``safetensors`` and ``gguf``: one file. The same
            on every rank. Missing parent directories are created. All but ``hf`` may be URLs in a store, such as
            ``s3://bucket/run/step_8``: each rank writes its files into a temporary directory, and sends them.
        model: A sharded model.
        optimizer: Built from its parameters.
        averaged: Averages of the model, saved in torch's form under ``ema_state_dict``.
        kind: ``sharded``: each rank writes its own part, in the format of torch's distributed checkpoint (DCP), with
            optimizer state by parameter name. ``local``: one file per rank. ``full``: one ``.pth`` file that plain
            PyTorch loads. Of the weights alone, ``hf``: a folder that ``from_pretrained`` of transformers loads;
            ``safetensors``: one such file; ``gguf``: a file that llama.cpp loads, of a Llama-like model. In one file
            and in a folder each rank writes its own rows; if the ranks do not see the same file, as on disks of their
            nodes, or it goes to a store, the first one writes what they send, a shard at a time.
        extra: More content beside ``state_dict`` and ``optimizer``, the same on every rank.
        like: For ``hf`` and ``gguf``: a Hugging Face folder of the same model, whose configuration and tokenizer are
            copied. If it has weights, their names and shapes must be the model's; a model of transformers 5 is
            written as its files have it.
        overwrite: Replace the checkpoint at ``path`` once the new one is complete.
        blocking: ``False``: return as soon as each rank has copied its part to CPU memory, and write in the background
            while training continues. The memory is kept for the next save, which first waits for this one.

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
        ConfigError: ``kind`` is unknown, or does not fit the path or another argument; or ``like`` or ``averaged`` does
            not fit the model.
    """
    state, scope = _savers(model)
    target = _agreed_target(
        path, scope, "save_checkpoint()", kind, optimizer, overwrite, blocking, averaged is not None
    )
    _check_kind(kind, (*_KINDS, *_MODELS))
    extra = dict(extra or {})
    if averaged is not None:
        check_averages_of(averaged, model)
        if AVERAGES in extra:
            raise ConfigError(f"extra holds {AVERAGES!r}, and so does averaged. Leave one of them out.")
        extra[AVERAGES] = averaged
    _check_arguments(path, target, kind, like, optimizer, extra)
    _make_free(target, state, scope, overwrite)
    if overwrite and kind != "hf" and not is_remote(target):  # a model's folder keeps what else is there
        on_all_ranks(lambda: refuse_other_content(target) if scope.is_first else None, scope)
    if kind in _MODELS:
        return _write_model(target, kind, model, state, like, overwrite, blocking)
    content: dict[str, Any] = {"state_dict": model_state_dict(model, "sharded")}
    if optimizer is not None:
        by_name = kind == "sharded"
        content["optimizer"] = optim_state_dict(model, optimizer, "sharded", by_name=by_name, param_names=True)
    if averaged is not None:
        extra[AVERAGES] = averaged.state_dict()
    return _write(target, {**content, **extra}, state, cast(Kind, kind), overwrite, blocking)


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
    return _write(target, content, state, kind, overwrite, blocking)


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
    has_averages: bool = False,
) -> Path:
    """Return the path once all ranks agree on it and on what else decides their steps. Collective: every rank."""
    target = checkpoint_path(same_path(path, scope))
    check_store(target, kind)
    saved = None if optimizer is None else type(optimizer).__name__
    given = {"kind": kind, "optimizer": saved, "overwrite": overwrite, "blocking": blocking, "averaged": has_averages}
    check_same_arguments(scope, call, given)
    return target


def _make_free(target: Path, state: ShardedModel, scope: Scope, overwrite: bool) -> None:
    """Wait until the save before is over, and check that nothing is at the target. Collective: every rank."""
    settle_saves(state.mesh)
    check_equal(state)

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
    kind: Kind,
    overwrite: bool,
    blocking: bool,
) -> PendingSave:
    saver = saver_of(state.mesh)  # training uses the model's groups meanwhile
    scope = saver.scope
    kept = with_boxes(content, scope, target)
    if not blocking:
        kept = own_copy(kept, saver, target)
    if kind == "full":
        return _carry_out(lambda: write_whole(target, kept, scope, overwrite=overwrite), saver, target, blocking)
    save = _begin(target, scope, overwrite)

    def write(save: DirectorySave) -> Files:
        if kind == "local":
            return write_rank_file(save, kept, state.mesh)
        return write_distributed(save, kept, state.mesh, scope)

    return _carry_out(lambda: save.finish(write, scope), saver, target, blocking)


def _write_model(
    target: Path,
    kind: str,
    model: nn.Module,
    state: ShardedModel,
    like: str | Path | None,
    overwrite: bool,
    blocking: bool,
) -> PendingSave:
    saver = saver_of(state.mesh)
    scope, chosen = saver.scope, _MODELS[kind]
    folder = None if like is None else Path(same_path(like, scope))
    given = with_boxes(model_state_dict(model, "sharded"), scope, target)
    weights = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if not blocking:
        weights = own_copy(weights, saver, target)
    files = ModelFiles.of(weights, chosen, target, scope, like=folder, overwrite=overwrite, model=state.module)
    if not chosen.directory:

        def step() -> None:
            shares = shares_of(files.weights, scope)
            publish_file(target, files.planned, shares, scope, overwrite=overwrite)

        return _carry_out(step, saver, target, blocking)
    save = DirectorySave.begin(target, scope, overwrite=overwrite)

    def write(save: DirectorySave) -> Files:
        return write_model_folder(save, files, scope)

    return _carry_out(lambda: save.finish(write, scope), saver, target, blocking)


def _carry_out(step: Callable[[], None], saver: Saver, target: Path, blocking: bool) -> PendingSave:
    if not blocking:
        return saver.start(step, target)
    step()
    return PendingSave.over()


def _begin(target: Path, scope: Scope, overwrite: bool) -> DirectorySave:
    kind = StoreSave if is_remote(target) else DirectorySave
    return kind.begin(target, scope, overwrite=overwrite)


def _check_arguments(
    path: str | Path,
    target: Path,
    kind: str,
    like: str | Path | None,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any],
) -> None:
    model = _MODELS.get(kind)
    needs_like = model is not None and bool(model.like)
    if needs_like != (like is not None):
        raise ConfigError(
            f"kind={kind!r} needs like=FOLDER, a Hugging Face folder of the same model, for its config.json and "
            "tokenizer."
            if like is None
            else f"like={str(like)!r} applies only to {_LIKE}, not to kind={kind!r}."
        )
    if model is not None and (optimizer is not None or extra):
        raise ConfigError(
            f"kind={kind!r} holds the weights alone. Leave out "
            f"{'the optimizer' if optimizer is not None else 'averaged' if AVERAGES in extra else 'extra'}, "
            "and save kind='sharded' beside it to resume from."
        )
    is_file = kind == "full" if model is None else not model.directory
    if not is_file and target.suffix in _FILES:
        raise ConfigError(
            f"A checkpoint of kind {kind!r} is a directory, and {str(path)!r} is named like a file. Leave out "
            f"{target.suffix!r}, or pass kind='full' for one file that plain PyTorch loads."
        )
    if taken := [key for key in ("state_dict", "optimizer", "mmfsdp") if key in extra]:
        raise ConfigError(f"extra holds {taken[0]!r}, which save_checkpoint() writes itself. Choose another key.")


def _check_kind(kind: str, known: tuple[str, ...] = _KINDS) -> None:
    if kind not in known:
        raise ConfigError(f"kind must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {kind!r}.")
