"""Converts between a sharded model's live state and the content of MMEngine's checkpoints."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
from mmengine.logging import HistoryBuffer
from torch.optim import Optimizer

from mmfsdp import load_optim_state_dict, optim_state_dict
from mmfsdp.collective import Scope, on_all_ranks, scope_of, shared
from mmfsdp.errors import ConfigError, FormatError, StateDictError, UnsafePickleError
from mmfsdp.saving import open_shared, open_store, read_checkpoint, read_verified, read_whole, reference_of
from mmfsdp.state import LoadReport
from mmfsdp_mmengine.checkpoints.downloads import download_content, local_path
from mmfsdp_mmengine.configs.agreement import check_alike
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of

__all__ = [
    "describe_mismatch",
    "load_content",
    "load_optimizer_content",
    "nothing_fits",
    "optimizer_content",
    "read_content",
    "revised_keys",
    "safe_globals",
    "with_own_counters",
]

_IMPLEMENTATION = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
    "decoupled_weight_decay",
    "param_names",
}
_READ_IN_PARTS = ("state_dict", "ema_state_dict", "optimizer")  # by this package, when it copies them to shards
_STATISTICS = ("min", "max", "mean", "current")
_REMOTE = re.compile(r"((?!file:)[a-z][a-z0-9+.-]*://|s3:|petrel:|pavi:|modelzoo:|open-mmlab:)")


def optimizer_content(
    model: nn.Module, optim_wrapper: Any, kind: Literal["full", "local", "sharded"]
) -> dict[str, Any]:
    """Return an optimizer wrapper's state in MMEngine's form, whole or sharded. Collective: every rank.

    The wrapper's own state, such as ``loss_scaler`` and ``base_param_settings``, is included.

    Args:
        model: The sharded model.
        optim_wrapper: An optimizer wrapper or an OptimWrapperDict.
        kind: ``full``: whole tensors on the first rank, and an empty dict on the others. ``local``: each rank's own
            shards. ``sharded``: each rank's own shards, with parameters by name.
    """
    contents = {}
    for name, wrapper in optim_wrappers_of(optim_wrapper).items():
        form: Literal["full", "sharded"] = "full" if kind == "full" else "sharded"
        state = optim_state_dict(model, wrapper.optimizer, form, by_name=kind == "sharded", param_names=True)
        own = {key: value for key, value in wrapper.state_dict().items() if key not in ("state", "param_groups")}
        contents[name] = {**state, **own} if state else {}
    return contents.get("", contents)


def load_optimizer_content(model: nn.Module, optim_wrapper: Any, content: Mapping[str, Any]) -> None:
    """Load the result of `optimizer_content`, or unsharded state that MMEngine saved. Collective: every rank.

    Args:
        model: The sharded model.
        optim_wrapper: An optimizer wrapper or an OptimWrapperDict.
        content: The state. Not changed.

    Raises:
        StateDictError: The state belongs to other optimizers, param groups or parameters.
    """
    wrappers = optim_wrappers_of(optim_wrapper)
    contents = {"": content} if "" in wrappers else content
    if contents.keys() != wrappers.keys():
        raise StateDictError(
            f"The checkpoint has the optimizers {sorted(map(str, contents))}, but the config has {sorted(wrappers)}."
        )
    for name, wrapper in wrappers.items():
        _check_settings(name, wrapper.optimizer, contents[name])
    for name, wrapper in wrappers.items():
        state = {key: value for key, value in contents[name].items() if key in ("state", "param_groups")}
        own = {key: value for key, value in contents[name].items() if key not in state}
        load_optim_state_dict(model, wrapper.optimizer, state)
        if own:
            # The wrapper keeps what it is given, and saves it again; its optimizer gets what was just loaded again.
            wrapper.load_state_dict({**read_whole(own, scope_of(None)), **wrapper.optimizer.state_dict()})


def _check_settings(name: str, optimizer: Optimizer, content: Mapping[str, Any]) -> None:
    """Raise for the state of an optimizer with other settings, which torch would load and perhaps fail on later."""
    groups = content.get("param_groups") or [{}]
    theirs = {key for key in groups[0] if not key.startswith(("initial_", "base_"))} - _IMPLEMENTATION
    mine = {*optimizer.defaults, "params"} - _IMPLEMENTATION
    # Versions of torch add settings, so that only differences on both sides count.
    if theirs - mine and mine - theirs:
        raise StateDictError(
            f"The checkpoint's optimizer{f' {name!r}' if name else ''} has the settings {_listed(theirs - mine)}, "
            f"but {type(optimizer).__name__} has {_listed(mine - theirs)}. Configure the optimizer that was saved, or "
            "load only the weights with load_from and resume=False."
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def read_content(path: str | Path) -> dict[str, Any]:
    """Return the content of a local checkpoint, with the weights under ``'state_dict'``. Not collective.

    Args:
        path: A file or directory in any format that core reads, or its URL in a store. Tensors stay there until they
            are copied into the model.

    Raises:
        CheckpointError: See `mmfsdp.saving.read_checkpoint`.
    """
    return _with_state_dict(read_checkpoint(path, safe_globals=safe_globals()), str(path))


def load_content(filename: str, map_location: Any, model: nn.Module, scope: Scope) -> dict[str, Any]:
    """Return a checkpoint's content, with the weights under ``'state_dict'``. Collective: every rank of the scope.

    Checksums are verified: all ranks together check a file here, and parts of directories are checked when they are
    read.

    Args:
        filename: A local file or directory, its ``file://`` URL, one in a store that core reads, or whatever else
            MMEngine loads: any other URL, or a model zoo's name.
        map_location: The device of tensors that come neither from files nor from web servers.
        model: The sharded model, which provides the shapes for files of stock MMEngine that do not state them.
        scope: The ranks that load.

    Raises:
        RankMismatchError: Ranks load different checkpoints.
        CheckpointError: A rank cannot download or read it; raised on every rank.
    """
    check_alike({"the checkpoint to load": filename}, scope)
    kind = shared(lambda: _kind_of(filename) if scope.is_first else None, scope)
    if kind != "elsewhere":
        path = filename if _REMOTE.match(filename) else local_path(filename)
        if kind == "lazy":
            content = open_shared(
                path,
                scope,
                safe_globals=safe_globals(),
                reference=lambda: reference_of(model),
                change=lambda content: _with_state_dict(content, filename),
            )[1]
            # Hooks that save state dicts of their own load them as tensors.
            others = {key: value for key, value in content.items() if key not in _READ_IN_PARTS}
            return {**content, **read_whole(others, scope)}
        # Hooks may use the tensors of a file, which is memory-mapped: the ranks verify all of it first.
        content = read_verified(path, scope, safe_globals=safe_globals(), reference=lambda: reference_of(model))
        return on_all_ranks(lambda: _with_state_dict(content, filename), scope)

    def read(path: Path) -> dict[str, Any]:
        return read_checkpoint(path, safe_globals=safe_globals(), reference=reference_of(model))

    with torch.serialization.safe_globals(safe_globals()):
        content = download_content(filename, _location(map_location), read)
    return on_all_ranks(lambda: _with_state_dict(content, filename), scope)


def _kind_of(filename: str) -> Literal["mapped", "lazy", "elsewhere"]:
    """Return how core reads a checkpoint; those elsewhere are left to MMEngine."""
    if not _REMOTE.match(filename):
        return "lazy" if local_path(filename).is_dir() else "mapped"
    folder, _, name = filename.rpartition("/")
    try:
        store = open_store(folder)
    except ConfigError:  # a web server, or a store without a driver
        return "elsewhere"
    if store is None or (not store.names(name) and store.read_size(name) is None):
        return "elsewhere"
    return "lazy"


def _with_state_dict(content: dict[str, Any], filename: str) -> dict[str, Any]:
    if "state_dict" not in content:
        if not content or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise FormatError(
                f"{filename} has no 'state_dict'. Its keys are {sorted(map(str, content))[:8]}.", file=str(filename)
            )
        content = {"state_dict": content}
    if not isinstance(content["state_dict"], Mapping):
        kind = type(content["state_dict"]).__name__
        raise FormatError(f"{filename} has a {kind} under 'state_dict', not a dict of tensors.", file=str(filename))
    return content


def revised_keys(state_dict: Mapping[str, Any], revisions: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a state dict whose keys are changed by ``(pattern, replacement)`` pairs of ``re.sub``, in order."""
    revised = dict(state_dict)
    for pattern, replacement in revisions:
        revised = {re.sub(pattern, replacement, key): value for key, value in revised.items()}
    return revised


def with_own_counters(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which missing ``num_batches_tracked`` of batch norm are filled in from the model.

    MMEngine does not report them as missing, because older checkpoints lack them.
    """
    counters = {name: buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")}
    return {**{name: buffer for name, buffer in counters.items() if name not in state_dict}, **state_dict}


def describe_mismatch(report: LoadReport) -> str:
    """Return the message for a state dict that does not match the model, in MMEngine's order."""
    lines = ["The model and loaded state dict do not match exactly", ""]
    lines += [f"size mismatch for {text}" for text in report.mismatched]
    if report.unexpected:
        lines.append(f"unexpected key in source state_dict: {', '.join(report.unexpected)}\n")
    if report.missing:
        lines.append(f"missing keys in source state_dict: {', '.join(report.missing)}\n")
    return "\n".join(lines)


def nothing_fits(report: LoadReport, model: str) -> str:
    """Return the message for a state dict that has no key of the model."""
    return (
        f"None of the {len(report.unexpected)} keys of the checkpoint, such as {report.unexpected[0]!r}, is one of "
        f"{model}'s, such as {report.missing[0]!r}: nothing would be loaded. It may be of another model. If it is of a "
        "part of this model, name it in the part's init_cfg=dict(type='Pretrained', checkpoint=...)."
    )


def _location(map_location: Any) -> Any:
    return "cpu" if map_location == "default" else map_location


def safe_globals() -> list[Any]:
    """Return the classes that MMEngine's content needs besides tensors and plain data: numpy histories of scalars.

    For ``torch.serialization.safe_globals``, to load a checkpoint with ``weights_only=True`` in plain PyTorch.
    """
    return [
        HistoryBuffer,
        (_statistic, "builtins.getattr"),
        *(getattr(HistoryBuffer, name) for name in _STATISTICS),
        np.ndarray,
        np.dtype,
        *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and issubclass(kind, np.dtype)),
        # numpy's constructors of arrays and scalars, wherever this version of numpy keeps them
        np.empty(0).__reduce__()[0],
        np.float64(0).__reduce__()[0],
        codecs.encode,
    ]


def _statistic(owner: Any, name: str) -> Any:
    """Replace ``getattr`` in pickles: histories use it to refer to their own methods, and to nothing else."""
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise UnsafePickleError(
            f"The checkpoint's pickle asks for attribute {name!r} of {owner!r}, which is not allowed."
        )
    return getattr(HistoryBuffer, name)
