"""Shows for each parameter of a plan which axes divide it, and what becomes of its gradient along each axis."""

from __future__ import annotations

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.planning.plan_data import PlanData
from mmfsdp.planning.plan_records import ParamEntry
from mmfsdp.planning.tables.repeats import join_repeated

__all__ = ["render_params"]

_COLUMNS = (
    Column("parameter", wraps=True),
    Column("shape"),
    Column("divided", wraps=True),
    Column("rank 0 holds"),
    Column("gradient", wraps=True),
)


def render_params(plan: PlanData, *, every_param: bool = False, width: int | None = None) -> str:
    """Return the parameters as an aligned table.

    Args:
        plan: The plan.
        every_param: Show each parameter in a row of its own. By default those of equal layers share one.
        width: The longest line in characters; None for no limit.
    """
    whole = {param.fqn for param in plan.ignored_params}
    params = plan.params_in_order()
    cells = [_cells(plan, param, param.fqn in whole) for param in params]
    keys = [(index if every_param else None, *row) for index, row in enumerate(cells)]
    groups = join_repeated([(param.fqn, key) for param, key in zip(params, keys, strict=True)])
    rows = [[group.name, *cells[group.members[0]]] for group in groups]
    return "\n".join(format_table(_COLUMNS, rows, width))


def _cells(plan: PlanData, param: ParamEntry, is_whole: bool) -> list[str]:
    sizes = {axis: size for axis, size in plan.mesh.sizes(param.divided).items() if size > 1}
    steps = [*param.divided, *([] if is_whole or not param.shape else [("shard", 0)])]
    divided = [f"{_named(plan, axis)} {dim}" for axis, dim in steps if axis in sizes]
    if plan.engine == "fsdp1":
        held = "a piece of the unit" if divided else _shape(param.shape)
    else:
        held = _shape(param.box(plan.mesh, 0, gathered=is_whole)[1])
    return [_shape(param.shape), ", ".join(divided) or "-", held, _gradient(plan, param, sizes)]


def _gradient(plan: PlanData, param: ParamEntry, sizes: dict[str, int]) -> str:
    """Return what becomes of a gradient: a mean along the axes of data, and equal along others that do not divide.

    A norm that sees a part of the sequence or of the heads has a part of its gradient, which is summed.
    """
    if not param.requires_grad:
        return "none"
    data = " x ".join(_named(plan, axis) for axis in ("replicate", "shard") if axis in sizes)
    if "expert" in dict(param.divided):  # tokens of all ranks reach an expert, so that its gradient is a sum over them
        return f"sum over {data or 'expert'} / {plan.mesh.data_size}"
    sequences = {division.fqn for division in plan.parallel if division.style == "sequence"}
    summed = [axis for axis in sizes if axis == "tensor" and param.fqn.rpartition(".")[0] in sequences]
    equal = [axis for axis in sizes if axis not in ("replicate", "shard", *summed, *dict(param.divided))]
    parts = [f"mean over {data}"] if data else []
    parts += [f"sum over {axis}" for axis in summed]
    return "; ".join([*parts, *(f"equal along {axis}" for axis in equal)]) or "-"


def _named(plan: PlanData, axis: str) -> str:
    return "shard x context" if axis == "shard" and plan.mesh.context > 1 else axis


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
