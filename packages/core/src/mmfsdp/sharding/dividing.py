"""Divides the modules of a unit as the plan's rules say, before the unit is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmfsdp.planning.division.records import ModuleDivision
from mmfsdp.planning.mesh import named_axes
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.sharding.experts import divide_experts

__all__ = ["UnitDivider"]

_DIMS = {"sequence": 1, "heads": 2, "features": -1}


class UnitDivider:
    """Divides the modules of one unit after the other. Not collective: each rank keeps its part of values it has whole.

    Args:
        model: The model, none of whose units is sharded yet.
        plan: The plan that is applied.
        mesh: The mesh, which has an axis ``tensor`` if the plan has divisions along it.
        experts: The mesh of experts, if the plan has divisions along ``expert``.
    """

    def __init__(self, model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
        self._model = model
        self._by_param: Mapping[str, ModuleDivision] = {
            f"{division.fqn}.{name}": division
            for division in plan.parallel
            for name, _ in model.get_submodule(division.fqn).named_parameters(recurse=False)
        }
        names = {axis: name for name, axis in named_axes(mesh).items()} if plan.parallel else {}
        self._tensor = mesh[names["tensor"]] if "tensor" in names else None
        self._experts = None if experts is None else experts[(experts.mesh_dim_names or ())[-1]]

    def __call__(self, unit: ShardUnit) -> None:
        """Divide the modules whose parameters a unit has, and tie again what torch unties.

        Args:
            unit: A unit of the plan, whose values are whole and equal on all ranks.
        """
        names = [name for param in unit.params for name in (param.fqn, *param.aliases)]
        divided = {found.fqn: found for name in names if (found := self._by_param.get(name)) is not None}
        for division in divided.values():
            module = self._model.get_submodule(division.fqn)
            frozen = [name for name, param in module.named_parameters(recurse=False) if not param.requires_grad]
            if division.style == "experts":
                assert self._experts is not None, "check_mesh requires it"
                divide_experts(module, self._experts, self._tensor)
                continue
            parallelize_module(module, self._tensor, _style(division), src_data_rank=None)
            for name in frozen:  # some of torch's styles make trained parameters of them
                module.get_parameter(name).requires_grad = False
        for entry in unit.params if divided else ():
            self._tie(entry.fqn, entry.aliases)

    def _tie(self, fqn: str, aliases: tuple[str, ...]) -> None:
        param = self._model.get_parameter(fqn)
        for alias in aliases:
            parent, _, name = alias.rpartition(".")
            setattr(self._model.get_submodule(parent), name, param)


def _style(division: ModuleDivision) -> ParallelStyle:
    inputs, outputs = _placement(division.input), _placement(division.output)
    if division.style == "sequence":
        assert division.input is not None, "a plan's divisions state their layouts"
        return SequenceParallel(sequence_dim=_DIMS[division.input], use_local_output=True)
    kind = ColwiseParallel if division.style == "colwise" else RowwiseParallel
    return kind(input_layouts=inputs, output_layouts=outputs)


def _placement(layout: str | None) -> Placement:
    return Shard(_DIMS[layout]) if layout in _DIMS else Replicate()
