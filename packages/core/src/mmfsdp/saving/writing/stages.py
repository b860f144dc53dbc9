"""Saves a model whose parts are sharded models of their own, such as the stages of a pipeline, as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.optimizer_forms import GROUPS
from mmfsdp.checkpoint.files.atomic import refuse_existing, refuse_other_content
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.collective.scopes import Scope, scope_of
from mmfsdp.collective.steps import check_same_arguments, gather_to_first, on_all_ranks, same_path
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.runtime.ranks.model_axes import check_equal
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.directory.store import check_store
from mmfsdp.saving.writing.background import settle_saves
from mmfsdp.saving.writing.distributed import Named, named_values, write_parts
from mmfsdp.saving.writing.publishing import DirectorySave
from mmfsdp.saving.writing.store_save import StoreSave, refuse_in_store
from mmfsdp.state.model import model_state_dict
from mmfsdp.state.optimizers.plain import optim_state_dict

__all__ = ["save_stages"]

_GROUPS = f"optimizer.{GROUPS}"


def save_stages(
    path: str | Path,
    stages: Sequence[nn.Module],
    optimizers: Sequence[Optimizer] = (),
    *,
    mesh: DeviceMesh,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Save the stages of a pipeline as one checkpoint of the whole model. Collective: every rank of the mesh.

    The checkpoint is what `save_checkpoint` writes of the whole model with ``kind="sharded"``: any number of stages,
    or none, loads it. The stages hold the model's own modules, so that their names are the model's.

    Args:
        path: A directory, or a URL in a store; the same on every rank.
        stages: The sharded models of this rank, with engine ``fsdp2``.
        optimizers: For each of them, the optimizer that was built from its parameters. All have equally many param
            groups with the same settings; a group may be empty.
        mesh: All ranks of all stages, such as the mesh ``("pipe", "shard")``.
        extra: More content beside ``state_dict`` and ``optimizer``, taken from the first rank.
        overwrite: Replace the checkpoint at ``path`` once the new one is complete.

    Raises:
        TargetExistsError: Something is at ``path``, and ``overwrite`` is False.
        CheckpointError: The checkpoint could not be written; what was at ``path`` is untouched.
        ConfigError: There is no stage, or not an optimizer for each; or the engine is ``fsdp1``.
        StateDictError: Two stages hold the same name, or their optimizers have different param groups.
        RankMismatchError: Ranks gave different paths or other arguments.
    """
    scope = scope_of(mesh)
    target = checkpoint_path(same_path(path, scope))
    check_store(target, "sharded")
    given = {"optimizers": bool(optimizers), "overwrite": overwrite}
    check_same_arguments(scope, "save_stages()", given)
    on_all_ranks(lambda: _check(stages, optimizers), scope)
    on_all_ranks(lambda: _make_free(target, overwrite) if scope.is_first else None, scope)
    parts, own = on_all_ranks(lambda: _parts_of(stages, optimizers), scope)
    if scope.is_first:
        parts |= named_values(extra or {})
    parts = _with_objects(parts, own, scope)
    kind = StoreSave if is_remote(target) else DirectorySave
    kind.begin(target, scope, overwrite=overwrite).finish(lambda save: write_parts(save, parts, scope), scope)


def _check(stages: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    if not stages or (optimizers and len(optimizers) != len(stages)):
        raise ConfigError(
            f"save_stages() got {len(stages)} stages and {len(optimizers)} optimizers. Give the stages of this rank, "
            "one at least, and for each the optimizer that was built from its parameters, or no optimizers."
        )
    if any(find_sharded_model(stage).is_fsdp1 for stage in stages):
        raise ConfigError("save_stages() takes models with engine 'fsdp2'. Shard the stages with that engine.")


def _make_free(target: Path, overwrite: bool) -> None:
    if is_remote(target):
        refuse_in_store(target, overwrite=overwrite)
    elif overwrite:
        refuse_other_content(target)
    else:
        refuse_existing(target)


def _parts_of(stages: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> tuple[dict[str, Named], set[str]]:
    """Return what this rank gives of its stages, by flat name: DTensors, and on a stage's first rank the rest.

    Also return the names of those stages whose first rank it is. Collective: every rank of each stage.
    """
    found: dict[str, Named] = {}
    own: set[str] = set()
    for at, stage in enumerate(stages):
        state = find_sharded_model(stage)
        state.settle()
        settle_saves(state.mesh)
        check_equal(state)
        content: dict[str, Any] = {"state_dict": model_state_dict(stage, "sharded")}
        if optimizers:
            content["optimizer"] = optim_state_dict(stage, optimizers[at], "sharded", by_name=True)
        groups = content.get("optimizer", {}).pop(GROUPS, None)
        is_first = state.scope.is_first
        values = named_values(content)
        if groups is not None:
            values[f"{_GROUPS}{at}"] = ("optimizer", GROUPS), groups
        for name, (keys, value) in values.items():
            if is_first or isinstance(value, DTensor):
                if name in found:
                    raise _twice(name)
                found[name] = keys, value
                own |= {name} if is_first else set()
    return found, own


def _with_objects(parts: dict[str, Named], own: set[str], scope: Scope) -> dict[str, Named]:
    """Return the parts without objects, which the first rank gets from all ranks. Collective: every rank of the scope.

    Raises:
        StateDictError: Two stages hold the same name, or their optimizers have different param groups.
    """
    tensors = {name: part for name, part in parts.items() if isinstance(part[1], torch.Tensor)}
    objects = {name: part for name, part in parts.items() if name not in tensors}
    held = [name for name, (_, value) in tensors.items() if not isinstance(value, DTensor) or name in own]
    gathered = gather_to_first(scope, (held, objects))

    def join() -> dict[str, Named]:
        taken: set[str] = set()
        joined: dict[str, Named] = {}
        groups: list[list[dict[str, Any]]] = []
        for names, others in gathered or ():
            if twice := taken.intersection(names):
                raise _twice(min(twice))
            taken.update(names)
            for name, (keys, value) in others.items():
                if name.startswith(_GROUPS):
                    groups.append(value)
                elif name not in joined or value in ({}, []):
                    joined[name] = keys, value
                else:
                    raise _twice(name)
        divided = {name[:at] for name in (*taken, *joined) for at, sign in enumerate(name) if sign == "."}
        joined = {name: part for name, part in joined.items() if name not in divided}  # empty in some stages
        return {**joined, **(named_values({"optimizer": {GROUPS: _joined(groups)}}) if groups else {})}

    return {**tensors, **on_all_ranks(join, scope)}


def _joined(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the param groups of the whole model's optimizer."""
    first = stages[0]
    for groups in stages:
        if len(groups) != len(first):
            raise StateDictError(
                f"The optimizers of two stages have {len(first)} and {len(groups)} param groups. Give them equally "
                "many, empty where a stage has no parameters for a group: {'params': []}."
            )
        for number, (one, other) in enumerate(zip(first, groups, strict=True)):
            for key in sorted({*one, *other} - {"params"}):
                if repr(one.get(key)) != repr(other.get(key)):
                    raise StateDictError(
                        f"The optimizers of two stages have {key}={one.get(key)!r} and {other.get(key)!r} in param "
                        f"group {number}, which is one group of the whole model's. Give all stages the same settings."
                    )
    return [
        {**group, "params": [name for groups in stages for name in groups[number]["params"]]}
        for number, group in enumerate(first)
    ]


def _twice(name: str) -> StateDictError:
    name = name.removeprefix("state_dict.")
    return StateDictError(
        f"Two stages hold {name!r}. Build each stage from the whole model's own modules, each in one stage and under "
        "its own name; modules that share a weight belong into one stage.",
        fqn=name,
    )
