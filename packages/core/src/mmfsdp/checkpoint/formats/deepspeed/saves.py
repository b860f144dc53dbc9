"""Reads the checkpoints of DeepSpeed (ZeRO stages 0 to 3, and universal ones) as weights and optimizer state by name.

A directory named by its tag holds ``mp_rank_00_model_states.pt``, or in stage 3 one such file per rank
(``zero_pp_rank_{rank}_mp_rank_00_model_states.pt``), and a file of the optimizer per rank
(``[bf16_]zero_pp_rank_{rank}_mp_rank_00_optim_states.pt``); each stage of a pipeline has such files. The file
``latest`` beside it holds its name. The weights are those in full precision that the optimizer keeps, as DeepSpeed's
``zero_to_fp32.py`` gives them; buffers and frozen parameters are as they are stored. What else a user saved
(``client_state``) stays at the top. MMEngine's DeepSpeedStrategy writes these files, too.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import LATEST_FILES, OF_DEEPSPEED, SourcePath
from mmfsdp.checkpoint.formats.deepspeed.divided_params import FrozenParams, ShardedParams
from mmfsdp.checkpoint.formats.deepspeed.pipeline_stages import StagedParams, layers_of, stages_of
from mmfsdp.checkpoint.formats.deepspeed.rank_files import Files
from mmfsdp.checkpoint.formats.deepspeed.universal import UniversalParams, check_listed
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, add_whole
from mmfsdp.checkpoint.integrity import inside, refuse_special
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
)

__all__ = ["read"]

_Params = ShardedParams | UniversalParams | StagedParams
_WEIGHTS, _OPTIMIZER, _OWN = "state_dict", "optimizer", "deepspeed"
# What describes the files themselves, which the layout replaces.
_STRUCTURE = {"module", "optimizer", "buffer_names", "param_shapes", "shared_params"}
_STRUCTURE |= {"frozen_param_shapes", "frozen_param_fragments"}
# What else DeepSpeed keeps beside a user's own content: it goes under a key of its own.
_COUNTERS = {"skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"}
_COUNTERS |= {
    "ds_version",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "checkpoint_parallel_dimensions",
}
_COUNTERS |= {"universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"}


def read(source: SourcePath) -> Layout:
    """Read the layout of a checkpoint of DeepSpeed: the directory of its files, or the one with the file ``latest``.

    Raises:
        CheckpointNotFoundError: There is none, or ``latest`` names one that is not there.
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: A file is of another save, or damaged.
        FormatError: It is of tensor or expert parallelism, or of a release before 0.5.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    folder = _folder_of(source.path, source.names)
    try:
        return _layout(stages_of(folder, trust=source.trust), source)
    except MmfsdpError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"The files in {folder.name} do not hold what DeepSpeed writes: {type(error).__name__}: {error}.",
            file=str(folder),
        ) from error


def _layout(stages: Sequence[Files], source: SourcePath) -> Layout:
    files = stages[0]
    model = files.model()
    tensors: dict[str, TensorEntry] = {}
    own = {key: value for key, value in model.items() if key in _COUNTERS and value is not None}
    params: _Params | None = None
    if files.is_universal or files.states:
        of_stages = [_params(stage, source) for stage in stages]
        params = of_stages[0] if len(of_stages) == 1 else StagedParams(of_stages)
    else:
        _refuse_without_states(files)
    layers = layers_of(files.folder, trust=source.trust)
    weights = _weights(files, layers, params, FrozenParams(files, look_up=source.look_up), tensors)
    if files.is_universal:
        check_listed(files.zero, weights)
    if params is None and len(stages) > 1:
        held = [_unwrapped(stage.model().get(_OPTIMIZER)) for stage in stages]
        optimizer = {"of_stages": _bound(f"{_OPTIMIZER}/of_stages", held, tensors)}
    elif params is None:
        optimizer = _bound(_OPTIMIZER, _unwrapped(model.get(_OPTIMIZER)), tensors)
    else:
        optimizer = _optimizer(params, tensors)
        own |= params.settings()
    client = {key: value for key, value in model.items() if key not in _STRUCTURE | _COUNTERS}
    if client.get("lr_scheduler", 0) is None:
        del client["lr_scheduler"]
    tree: dict[Any, Any] = {_WEIGHTS: weights}
    if optimizer:
        # MMEngine keeps apart some entries that it keeps in the optimizer's state elsewhere.
        wrapper = client.pop("optim_wrapper", {}) if "meta" in client else {}
        tree[_OPTIMIZER] = {**optimizer, **_bound(_OPTIMIZER, wrapper, tensors)}
    taken = {key: client.pop(key) for key in (*tree, _OWN) if key in client}
    rest = {**client, _OWN: own, **({"client_state": taken} if taken else {})}
    return Layout(files.folder, _OWN, params.ranks if params else 1, tensors, {**tree, **_bound("", rest, tensors)})


def _params(files: Files, source: SourcePath) -> ShardedParams | UniversalParams:
    if files.is_universal:
        return UniversalParams(files, trust=source.trust)
    return ShardedParams(files, look_up=source.look_up)


def _weights(
    files: Files,
    layers: Mapping[str, Any],
    params: _Params | None,
    frozen: FrozenParams,
    tensors: dict[str, TensorEntry],
) -> dict[str, Any]:
    """Return the weights, in the order of the model's state dict."""
    model = files.model()
    module = model["module"] or layers
    shared: Mapping[str, str] = model.get("shared_params") or {}
    weights: dict[str, Any] = collections.OrderedDict()
    vars(weights).update(vars(module) if isinstance(module, collections.OrderedDict) else {})
    trained = params.shapes if params else {}
    known = dict.fromkeys((*trained, *frozen.shapes))
    for name in dict.fromkeys([*module, *known, *(tied for tied in shared if shared[tied] in known)]):
        path = f"{_WEIGHTS}/{name}"
        origin = name if name in known else shared.get(name, name)
        if params and origin in trained:
            weights[name] = _added(path, params.weights(origin), tensors)
        elif origin in frozen.shapes:
            weights[name] = _added(path, frozen.weights(origin), tensors)
        else:
            _refuse_placeholder(files, name, module[name])
            weights[name] = _bound(path, module[name], tensors)
    return weights


def _optimizer(params: _Params, tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """Return the optimizer's state, by names of parameters."""
    if (undivided := params.undivided()) is not None:
        return {"of_ranks": _bound(f"{_OPTIMIZER}/of_ranks", undivided, tensors)}
    state = {}
    for name in params.shapes:
        path = f"{_OPTIMIZER}/state/{name}"
        entries = {
            key: _added(f"{path}/{key}", value, tensors)
            if isinstance(value, TensorEntry)
            else _bound(f"{path}/{key}", value, tensors)
            for key, value in params.state(name).items()
        }
        if entries:
            state[name] = entries
    groups = _bound(f"{_OPTIMIZER}/param_groups", params.param_groups(), tensors)
    return {"state": state, "param_groups": groups} if state or groups else {}


def _unwrapped(optimizer: Any) -> Any:
    """Return the state of an optimizer without ZeRO, whose wrapper for half precision keeps it one level down."""
    inner = optimizer.get("optimizer_state_dict") if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict):
        return optimizer
    return {**inner, **{key: value for key, value in optimizer.items() if value is not inner and key not in inner}}


def _added(path: str, entry: TensorEntry, tensors: dict[str, TensorEntry]) -> TensorRef:
    """Add a tensor under its path, or one like it if that is taken; return its mark."""
    unique = unique_name(path, tensors)
    tensors[unique] = replace(entry, name=unique)
    return TensorRef(unique)


def _bound(path: str, value: Any, tensors: dict[str, TensorEntry]) -> Any:
    """Return content with each whole tensor added and replaced by its mark."""

    def bind(name: str, leaf: Any) -> Any:
        return add_whole(f"{path}/{name}".strip("/"), leaf, tensors) if isinstance(leaf, PickledTensor) else leaf

    return map_leaves(value, bind)


def _refuse_without_states(files: Files) -> None:
    """Raise if ZeRO divided the weights, and the files of the optimizer are not there."""
    model, path = files.model(), files.models[min(files.models)]
    if not model.get("param_shapes") or model.get(_OPTIMIZER) is not None:
        return
    way_out = (
        ""
        if files.is_partitioned
        else f" For those in half precision, convert {path.name} with {argument('keep', 'module')}."
    )
    raise IncompleteCheckpointError(
        f"{files.folder.name} has no *_optim_states.pt, which hold the weights in full precision.{way_out}",
        file=str(files.folder),
    )


def _refuse_placeholder(files: Files, name: str, leaf: Any) -> None:
    """Raise if stage 3 left an empty tensor for a parameter."""
    empty = isinstance(leaf, PickledTensor) and leaf.shape == (0,)
    if files.is_partitioned and empty and name not in files.model().get("buffer_names", ()):
        raise IncompleteCheckpointError(
            f"{files.folder.name} does not hold the parameter {name!r}: it was frozen, and releases of DeepSpeed "
            "before 0.10 do not save frozen parameters in stage 3.",
            file=str(files.folder),
        )


def _folder_of(path: Path, names: list[str]) -> Path:
    """Return the directory that holds the files: this one, or the one that its file ``latest`` names.

    Raises:
        CheckpointNotFoundError: The directory that it names does not exist, or has no files of DeepSpeed.
        FormatError: It names a directory somewhere else.
    """
    if any(name.endswith(OF_DEEPSPEED) for name in names):
        return path
    found = next((name for name in LATEST_FILES if name in names), None)
    tags = [name for name in names if (path / name).is_dir() and _holds_states(path / name)]
    has = f"It has {name_list(tags)}." if tags else "It has none."
    if found is None:
        raise CheckpointNotFoundError(
            f"{path.name} has no file 'latest' that names a checkpoint of DeepSpeed. {has}", file=str(path)
        )
    latest = inside(path, found, path)
    refuse_special(latest, directory=False)
    with latest.open("rb") as file:
        tag = file.read(4096).decode(errors="replace").strip()
    folder = _named_folder(path, tag, latest)
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{path.name}/{found} names the checkpoint {tag!r}, which is not there. {has}", file=str(latest)
        )
    if not _holds_states(folder):
        raise CheckpointNotFoundError(
            f"{path.name}/{found} names {tag!r}, which holds no files of DeepSpeed. {has}", file=str(folder)
        )
    return folder


def _named_folder(path: Path, name: str, origin: Path) -> Path:
    """Return a folder that a file names, which must be directly within this one."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise FormatError(f"{origin.name} names the directory {name!r}, which is no name.", file=str(origin))
    return path / name


def _holds_states(folder: Path) -> bool:
    return any(entry.name.endswith(OF_DEEPSPEED) for entry in folder.iterdir())
