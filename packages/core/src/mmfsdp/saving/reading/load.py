"""Loads a checkpoint of any kind and world size into a sharded model; each rank reads only the bytes it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.basics.text import WRAPPER_PREFIX, name_list
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.checkpoint.formats.deepspeed.format import of_deepspeed_within
from mmfsdp.checkpoint.formats.opening import optimizers_beside, weights_beside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import listed
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks
from mmfsdp.errors import ConfigError, FormatError, StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.saving.reading.contents import open_shared, read_whole
from mmfsdp.saving.reading.own_names import part_of
from mmfsdp.saving.reading.source import Source
from mmfsdp.state.averaged_model import AVERAGES, AveragedModel, check_averages_of, compare_averages
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.optimizers.fitting import renamed
from mmfsdp.state.optimizers.plain import prepare_optim_load
from mmfsdp.state.report import LoadReport

__all__ = ["load_checkpoint", "load_with_rest", "reference_of", "under_tied_names"]


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averaged: AveragedModel | None = None,
    strict: bool = True,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
    part: bool = False,
) -> tuple[dict[str, Any], LoadReport]:
    """Load a checkpoint of any kind and world size into a sharded model. Collective: every rank.

    The first rank reads the checkpoint's description and tells each rank where its own part lies; each rank reads only
    that. The work of a rank depends on the size of its part, not on the number of ranks. Every rank gets the first
    rank's buffers; `CheckpointManager.resume` restores each rank's own where they differ, such as running statistics.

    Args:
        path: Anything that `mmfsdp.checkpoint.open_layout` reads: what `save_checkpoint` wrote, a ``.pth`` of plain
            PyTorch (weights under ``state_dict`` or ``model``, or bare), a directory of torch's distributed checkpoint,
            safetensors or ``.bin`` files with or without their index, or a ``local`` checkpoint of stock MMEngine. If
            all names begin with ``module.``, that prefix is removed. The same on every rank.
        model: A sharded model.
        optimizer: Built from the model's parameters; its state is loaded if it is given.
        averaged: Averages of the model, which are loaded if they are given.
        strict: Raise if keys or shapes do not match.
        verify: Compare what is read with the checkpoint's checksums, if it has any. ``False`` saves a little time.
        safe_globals: Classes that the file's pickle may hold besides tensors, plain data and numpy's arrays of numbers.
        reference: See `mmfsdp.checkpoint.open_layout`; by default `reference_of` the model.
        part: The model is a part of the saved one under its own names, such as a stage of a pipeline: load this part,
            and leave out weights and optimizer state of the rest.

    Returns:
        The rest of the content, with its tensors read whole into CPU memory; and a report of the keys and shapes that
        did not match. If ``optimizer`` is not given, the rest has the optimizer's state with tensors that stay on disk
        (`mmfsdp.state.lazy_tensors.LazyTensor`): `load_optim_state_dict` takes it, and each rank reads its own part.

    Raises:
        CheckpointError: The checkpoint cannot be read, is damaged, or was replaced while it was read; raised on every
            rank.
        RankMismatchError: Ranks gave different paths or other arguments.
        StateDictError: The checkpoint does not fit the model, its averages or the optimizer; raised on every rank, and
            nothing is changed.
        ConfigError: ``averaged`` is no `AveragedModel` of the model, or is given with ``part``.
    """
    if averaged is not None:
        check_averages_of(averaged, model)
        if part:
            raise ConfigError("part=True loads weights and optimizer state. Leave averaged out.")
    state = find_sharded_model(model)
    rest, report, source = load_with_rest(
        path,
        model,
        optimizer,
        strict=strict,
        verify=verify,
        safe_globals=safe_globals,
        reference=reference,
        prepare=lambda content: part_of(content, state) if part else _with_averages(content, averaged, path),
        has_averages=averaged is not None,
    )
    scope = find_sharded_model(model).scope
    if averaged is not None:
        averaged.load_state_dict(rest.pop(AVERAGES))
    on_disk = {key: rest.pop(key) for key in ("optimizer",) if key in rest}
    rest = {**read_whole(rest, scope), **on_disk}
    on_all_ranks(source.check_unchanged, scope)
    return rest, report


def load_with_rest(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    safe_globals: Iterable[Any] = (),
    reference: str | Path | Layout | None = None,
    lazy: Collection[str] = (),
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content,
    has_averages: bool = False,
) -> tuple[dict[str, Any], LoadReport, Source]:
    """Load as `load_checkpoint` does, and leave tensors of the rest on disk. Collective: every rank.

    Args:
        path: See `load_checkpoint`.
        model: See `load_checkpoint`.
        optimizer: See `load_checkpoint`.
        strict: See `load_checkpoint`.
        verify: See `load_checkpoint`.
        safe_globals: See `load_checkpoint`.
        reference: See `load_checkpoint`.
        lazy: Keys of the content whose tensors the first rank does not read, besides weights and optimizer state.
        prepare: Called on the first rank with the content, before anything is loaded; every rank receives what it
            returns. Its errors are raised on every rank.
        has_averages: Whether this rank will load averages, which all ranks or none do.

    Returns:
        The rest of the content, with tensors that stay on disk; a report; and where the tensors are read from.

    Raises:
        MmfsdpError: See `load_checkpoint`.
    """
    state = find_sharded_model(model)
    scope = state.scope
    loaded = None if optimizer is None else type(optimizer).__name__
    given = {"optimizer": loaded, "averaged": has_averages, "strict": strict, "verify": verify}
    check_same_arguments(scope, "load_checkpoint()", given)
    own = [param.fqn for param in state.plan.all_params()]

    def checked(content: dict[str, Any]) -> dict[str, Any]:
        for key, what in (("state_dict", "weights"), ("optimizer", "optimizer state")):
            if key not in content and (key == "state_dict" or optimizer is not None):
                found = name_list(sorted(map(str, content))) or "nothing"
                raise FormatError(
                    f"The checkpoint holds no {what} under {key!r}; it has {found}.{_elsewhere(path, key)}",
                    file=str(path),
                )
        if optimizer is not None and isinstance(content["optimizer"], list):
            raise FormatError(
                "The optimizer's state is a list by rank: each rank saved pieces of flat parameters, and nothing says "
                "which parameters these are. Load without the optimizer: rest['optimizer'] is the list.",
                file=str(path),
            )
        content = _without_prefix(content, own)
        return prepare({**content, "state_dict": under_tied_names(content["state_dict"], state)})

    source, content = open_shared(
        path,
        scope,
        verify=verify,
        safe_globals=safe_globals,
        reference=lambda: reference or reference_of(model),
        change=checked,
        lazy=lazy,
    )
    weights = content.pop("state_dict")
    # Check that everything fits before anything is changed.
    finish = prepare_optim_load(model, optimizer, content.pop("optimizer")) if optimizer is not None else None
    report = load_model_state_dict(model, weights, strict=strict)
    if finish is not None:
        finish()
    return content, report, source


def _with_averages(content: dict[str, Any], averaged: AveragedModel | None, path: str | Path) -> dict[str, Any]:
    """Return content after checking that it has averages that fit. Not collective."""
    if averaged is None:
        return content
    if AVERAGES not in content:
        raise FormatError(
            f"The checkpoint holds no averages under {AVERAGES!r}; it has {name_list(sorted(map(str, content)))}. Load "
            "it without averaged: the first update_parameters() then begins with the weights.",
            file=str(path),
        )
    found = compare_averages(averaged, content[AVERAGES])
    if found.missing or found.mismatched:
        raise StateDictError(f"The averages of the checkpoint do not fit the model: {found}.")
    return content


def _elsewhere(path: str | Path, key: str) -> str:
    """Return a sentence that says where weights or optimizer state are, if they are beside the path or within it."""
    if key == "optimizer" and (name := of_deepspeed_within(checkpoint_path(path))):
        return f" Give DeepSpeed's checkpoint within it, {name!r}."
    if key == "optimizer" and (names := optimizers_beside(checkpoint_path(path))):
        return (
            f" Beside it lies {listed(names)}: load the weights without the optimizer, and then its state with "
            "load_optim_state_dict(model, optimizer, read_checkpoint(...)['optimizer']), from mmfsdp.saving."
        )
    names = weights_beside(checkpoint_path(path)) if key == "state_dict" else []
    return f" Open what lies beside it: {listed(names)}." if names else ""


def _without_prefix(content: dict[str, Any], own: list[str]) -> dict[str, Any]:
    """Return content without the prefix ``module.`` that DistributedDataParallel adds to every name."""
    weights = content["state_dict"]
    if any(name.startswith(WRAPPER_PREFIX) for name in own) or not all(
        str(name).startswith(WRAPPER_PREFIX) for name in weights
    ):
        return content
    content = {**content, "state_dict": {name.removeprefix(WRAPPER_PREFIX): value for name, value in weights.items()}}
    if isinstance(content.get("optimizer"), dict):
        content["optimizer"] = renamed(content["optimizer"], WRAPPER_PREFIX)
    return content


def under_tied_names(weights: Mapping[str, Any], state: ShardedModel) -> dict[str, Any]:
    """Return weights under every name that the model ties to theirs: files such as Hugging Face's hold them once."""
    found = dict(weights)
    for param in state.plan.all_params():
        names = (param.fqn, *param.aliases)
        given = [name for name in names if name in weights]
        if given:
            found |= {name: weights[given[0]] for name in names if name not in weights}
    return found


def reference_of(model: nn.Module) -> Layout:
    """Return a sharded model's own names and shapes, for checkpoints that do not store them. Not collective.

    Weights that may have been in channels-last order when they were saved are left out: their shape does not say in
    which order a flat parameter holds their elements.
    """
    tensors: dict[str, TensorEntry] = {}
    for number, param in enumerate(find_sharded_model(model).plan.all_params()):
        if len(param.shape) in (4, 5) and param.shape[1] > 1 and math.prod(param.shape[2:]) > 1:
            continue
        whole = Chunk(Path("the model"), number, param.nbytes, (0,) * len(param.shape), param.shape)
        for name in (param.fqn, *param.aliases):
            tensors[name] = TensorEntry(name, param.dtype, param.shape, (whole,))
    return Layout(Path("the model"), "model", 1, tensors, {name: TensorRef(name) for name in tensors})
