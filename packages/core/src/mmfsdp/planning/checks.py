"""Checks that an engine can carry out a plan; each error says what to change."""

from __future__ import annotations

import sys

import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.basics.text import name_list
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, FrozenParametersError, MeshError, PlanError
from mmfsdp.planning.plan_records import MeshSpec, ShardUnit

__all__ = ["check_dense", "check_forward_methods", "check_reshard", "check_units", "check_unsharded"]


def check_unsharded(model: nn.Module) -> None:
    """Raise if the model is sharded, wrapped or compiled already.

    Raises:
        PlanError: The model is one of these; the message says what to plan instead.
    """
    if [name for name, _ in model.named_children()] == ["_orig_mod"]:
        raise PlanError(
            f"The model is compiled already: torch.compile() returned it ({type(model).__name__}). Plan and shard the "
            "model that you gave to torch.compile(), and compile afterwards: "
            "model = torch.compile(mmfsdp.shard(model, config)).",
            fqn="",
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a second to import, and nothing is sharded without it
    wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    for fqn, module in model.named_modules():
        if isinstance(module, (*wrappers, DistributedDataParallel)):
            raise PlanError(
                f"{fqn or '(root)'} is sharded or wrapped already ({type(module).__name__}). Plan the original "
                "model; a model is sharded once, with all its units.",
                fqn=fqn,
            )


def check_dense(model: nn.Module, mesh: MeshSpec, units: tuple[ShardUnit, ...]) -> None:
    """Raise for embeddings with sparse gradients, which torch's FSDP cannot reduce.

    Raises:
        PlanError: Such an embedding is trained, and its gradient is reduced.
    """
    sharded = {param.fqn for unit in units for param in unit.params}
    for fqn, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
            continue
        if module.weight.requires_grad and (mesh.world_size > 1 or f"{fqn}.weight".lstrip(".") in sharded):
            raise PlanError(
                f"{fqn or '(root)'} is an {type(module).__name__} with sparse=True. Its gradient is a sparse tensor, "
                "which torch's FSDP cannot reduce over ranks. Set sparse=False, and train it by an optimizer of dense "
                "gradients: torch.optim.Adam in place of SparseAdam.",
                fqn=fqn,
            )


def check_units(units: tuple[ShardUnit, ...], engine: str, config: ShardConfig) -> None:
    """Raise for units whose parameters cannot be sharded together.

    Raises:
        FrozenParametersError: Frozen and trained parameters would share one flat parameter.
        PlanError: A unit has parameters of several dtypes.
    """
    for unit in units:
        rest = [param.fqn for param in unit.params if "expert" not in dict(param.divided)]
        if unit.has_experts and rest:
            raise PlanError(
                f"Shard unit {unit.fqn or '(root)'!r} holds experts, which are sharded over other ranks than all else, "
                f"and {name_list(rest, 3)}, which the axis 'expert' does not divide. Move the experts' parameters into "
                "a module of their own, which becomes a unit.",
                fqn=rest[0],
            )
        frozen = [param.fqn for param in unit.params if not param.requires_grad]
        trained = [param.fqn for param in unit.params if param.requires_grad]
        if frozen and trained and not config.sharding.use_orig_params:
            raise FrozenParametersError(
                f"use_orig_params=False puts all parameters of a shard unit into one flat parameter, but unit "
                f"{unit.fqn or '(root)'!r} has frozen parameters ({name_list(frozen, 3)}) as well as trained "
                f"ones ({name_list(trained, 3)}). Set use_orig_params=True, or wrap the frozen modules as units of "
                "their own.",
                fqn=unit.fqn,
            )
        dtypes = {param.dtype for param in unit.params if param.requires_grad or engine == "fsdp1"}
        if len(dtypes) > 1:
            odd = {dtype: [param.fqn for param in unit.params if param.dtype == dtype] for dtype in sorted(dtypes)}
            found = "; ".join(f"{dtype}: {name_list(fqns, 3)}" for dtype, fqns in odd.items())
            raise PlanError(
                f"Shard unit {unit.fqn or '(root)'!r} mixes parameters of several dtypes ({found}), which cannot be "
                "gathered together. Wrap the modules of one dtype as units of their own, ignore those parameters, or "
                "set precision.storage_dtype.",
                fqn=unit.fqn,
            )


def check_reshard(units: tuple[ShardUnit, ...], mesh: MeshSpec) -> None:
    """Raise if ``reshard_after_forward`` does not divide the shard groups.

    Raises:
        MeshError: A unit's setting does not divide them.
    """
    for unit in units:
        size, ranks = unit.reshard_after_forward, unit.shard_ranks(mesh)
        if not isinstance(size, bool) and ranks % size:
            divisors = [n for n in range(2, ranks) if ranks % n == 0]
            raise MeshError(
                f"reshard_after_forward={size} needs shard groups that divide into groups of {size} ranks, but they "
                f"have {ranks}. Use true, false" + (f" or one of {divisors}." if divisors else "."),
                config="sharding.reshard_after_forward",
            )


def check_forward_methods(config: ShardConfig, units: tuple[ShardUnit, ...]) -> None:
    """Raise for forward methods that no unit has.

    Raises:
        ConfigError: No unit has a method of that name.
    """
    present = {name for unit in units for name in unit.forward_methods}
    for name in config.sharding.forward_methods:
        if name not in present:
            raise ConfigError(
                f"No shard unit has a method {name!r}. Remove it, or wrap the module that has it.",
                config="sharding.forward_methods",
            )
