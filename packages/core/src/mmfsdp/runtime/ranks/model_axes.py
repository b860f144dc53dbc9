"""Checks that ranks along an axis for model parallelism get the same batch, and keep equal what nothing divides there.

Each rank of such a group computes what the others compute, but for the parts that the axis divides. Other batches,
other random numbers or a gradient that is not summed over the axis go unnoticed: losses look plausible, and weights
drift apart.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import Scope, scope_of
from mmfsdp.collective.steps import all_equal, any_of, gather_objects, on_all_ranks
from mmfsdp.errors import PlanError, RankMismatchError, ShardStateError
from mmfsdp.planning.distributed_params import divided_tensors
from mmfsdp.planning.mesh import MODEL_AXES, axis_of
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.dtensors import data_mesh
from mmfsdp.runtime.ranks.stage_inputs import given_inputs
from mmfsdp.runtime.sharded_model import ShardedModel

__all__ = ["check_drawn", "check_equal", "check_foreign", "watch_model_axes"]

_FORWARDS = 3
"""How many training forwards are compared."""

_AT_ONCE = 1 << 22  # elements whose bits are summed at once


def watch_model_axes(state: ShardedModel) -> None:
    """Compare batches, random numbers and equal parameters in the first training forwards. Not collective.

    Nothing is done for a model without axes for model parallelism. The hooks are collective: every rank of the model's
    mesh runs its first forwards.
    """
    if not (axes := _axes(state)):
        return
    me, watched = weakref.ref(state), [_Watched(name) for name in axes]
    left, handles = _FORWARDS, list[Any]()
    has_values = True

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal has_values
        live = me()
        if live is None or not torch.is_grad_enabled() or live.is_running:
            return
        given = given_inputs(args, kwargs)
        has_values = given is not None
        if given is None:
            return
        if left == _FORWARDS:
            check_drawn(live)
        check_equal(live)
        for axis in watched:
            axis.begin(live, given)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal left
        live = me()
        if live is None or not torch.is_grad_enabled() or live.is_running or not has_values:
            return
        for axis in watched:
            axis.end(live)
        left -= 1
        if not left:
            for handle in handles:
                handle.remove()

    root = state.module
    handles.append(root.register_forward_pre_hook(torch.compiler.disable(before), prepend=True, with_kwargs=True))
    handles.append(root.register_forward_hook(torch.compiler.disable(after)))


def check_foreign(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Check that DTensors have values and lie on the mesh, and that gradients of ignored ones can be averaged.

    Not collective.

    Args:
        model: The model, not sharded yet.
        plan: Its plan.
        mesh: The mesh that it will be sharded over.
        experts: The mesh of its experts.

    Raises:
        PlanError: One is on the meta device, or divided over other ranks than those of the mesh's axis; or a trained
            one that is ignored is divided over ranks that get different batches, as experts are.
    """
    ignored = {entry.fqn for entry in plan.ignored_params}
    for fqn, tensor in divided_tensors(model):
        if fqn not in ignored:
            _check_ranks(fqn, tensor, mesh, experts)
        if tensor.is_meta:
            raise PlanError(
                f"{fqn!r} is divided, and on the meta device, where each rank would draw its part by itself. Give the "
                "model its values before you divide it, the same on every rank.",
                fqn=fqn,
            )
    data = {rank for group in data_mesh(mesh).get_all_groups() for rank in dist.get_process_group_ranks(group)}
    for entry in plan.ignored_params:
        param = model.get_parameter(entry.fqn)
        if isinstance(param, DTensor) and param.requires_grad:
            shared = {int(rank) for rank in param.device_mesh.mesh.flatten()} & data
            if len(shared) > 1:
                raise PlanError(
                    f"{entry.fqn!r} is ignored, and divided over the ranks {sorted(shared)}, which get different "
                    "batches, so that its gradient cannot be averaged over them as that of other ignored parameters. "
                    "Keep the module out of the sharded one, and reduce its gradients yourself; or freeze it.",
                    fqn=entry.fqn,
                )


def _check_ranks(fqn: str, tensor: DTensor, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    [axis] = [axis_of(name) for name in tensor.device_mesh.mesh_dim_names or ()]
    whole = experts if axis == "expert" else mesh
    if whole is None:
        raise PlanError(
            f"{fqn!r} is divided along {axis!r} already, and no mesh of experts is given. Give two meshes: (mesh, "
            "experts), the second with the dimensions 'efsdp' and 'expert', over which you divided them.",
            fqn=fqn,
        )
    name = next(name for name in whole.mesh_dim_names or () if axis_of(name) == axis)
    ranks, found = dist.get_process_group_ranks(whole.get_group(name)), tensor.device_mesh.mesh.tolist()
    if ranks != found:
        raise PlanError(
            f"{fqn!r} is divided over the ranks {found}, but the axis {axis!r} of the given mesh has the ranks {ranks} "
            f"here. Give the mesh that you divided the model over: mesh[{name!r}] of it.",
            fqn=fqn,
        )


def check_equal(state: ShardedModel) -> None:
    """Check that parameters are equal to the last bit along each axis that does not divide them.

    Collective: every rank of the model's mesh. It costs two reductions of 16 bytes per parameter and axis; nothing for
    a model without axes for model parallelism.

    Raises:
        RankMismatchError: One differs; raised on every rank.
    """
    for name in _axes(state):
        unequal = _unequal(state, name)
        ranks = dist.get_process_group_ranks(state.mesh.get_group(name))
        on_all_ranks(functools.partial(_refuse, unequal, ranks, name), state.scope)


def _unequal(state: ShardedModel, name: str) -> tuple[str, int] | None:
    """Return a parameter that differs along an axis, and which rank of the group has another one than the first."""
    own = {clean_fqn(fqn): param for fqn, param in state.module.named_parameters(remove_duplicate=False)}
    apart = {axis_of(name), "expert"}  # ranks of any axis hold different experts
    entries = (param for unit in state.plan.units for param in unit.params if not apart & dict(param.divided).keys())
    fqns = [entry.fqn for entry in entries]
    if not fqns:
        return None
    group = state.mesh.get_group(name)
    sums = torch.stack([_sum_of_bits(_local(own[fqn])) for fqn in fqns])
    least, most = sums.clone(), sums.clone()
    with Waiting(f"comparing parameters along the axis {name!r}"):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        odd = (least != most).any(1).tolist()
        if not any(odd):
            return None
        found = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, sums, group=group)  # all ranks of the group come here
    index = odd.index(True)
    return fqns[index], next(at for at, value in enumerate(found) if not torch.equal(value[index], found[0][index]))


def _refuse(unequal: tuple[str, int] | None, ranks: list[int], name: str) -> None:
    if unequal is not None:
        fqn, other = unequal
        raise RankMismatchError(
            f"{fqn!r} differs between the ranks {ranks[0]} and {ranks[other]}, which are in one group of the axis "
            f"{name!r}. Nothing divides it along this axis, so its values must stay equal: give these ranks the same "
            "weights, batches and seeds, and sum its gradient over the axis where each of them sees a part of the "
            "sequence or of the heads (torch's SequenceParallel style does, with sequence_dim=2 for norms of heads)."
        )


def check_drawn(state: ShardedModel) -> None:
    """Check that the ranks of ``tensor`` hold different parts of the parameters that it divides.

    Collective: every rank of the mesh. torch draws parts alike if a model on the CPU is initialised after it was
    divided. A single parameter may repeat itself along the axis, as keys that are copied for more ranks do, so one that
    does not is enough.

    Raises:
        ShardStateError: All parts are alike; raised on every rank.
    """
    own = {clean_fqn(fqn): param for fqn, param in state.module.named_parameters(remove_duplicate=False)}
    for name in _axes(state):
        entries = (param for unit in state.plan.units for param in unit.params if "tensor" in dict(param.divided))
        parts = {entry.fqn: _local(own[entry.fqn]) for entry in entries}
        varied = any(part.numel() > 1 and bool((part != part.flatten()[0]).any()) for part in parts.values())
        sums = torch.stack([_sum_of_bits(part) for part in parts.values()])
        least, most = sums.clone(), sums
        group = state.mesh.get_group(name)
        with Waiting(f"comparing the parts of parameters along the axis {name!r}"):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        alike = {fqn for fqn, same in zip(parts, (least == most).all(1).tolist(), strict=True) if same}
        if any_of(state.scope, len(alike) < len(parts)) or not any_of(state.scope, varied):
            continue
        raise ShardStateError(
            f"Of every parameter that {name!r} divides, the ranks of this axis hold the same values. torch draws them "
            "so on the CPU if a model is initialised after it was divided. Initialise it alike on all ranks, then "
            "divide it; or load weights after shard().",
            fqn=next(iter(parts)),
        )


class _Watched:
    """Compares what the ranks of one axis get in a forward."""

    def __init__(self, name: str) -> None:
        self._name, self._random, self._are_equal = name, "", True

    def begin(self, state: ShardedModel, batch: Any) -> None:
        """Compare the batch, and remember the state of random numbers. Collective: every rank of the mesh."""
        scope = self._scope(state)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        said = [(tuple(tensor.shape), str(tensor.dtype), _sum_of_bits(_local(tensor)).tolist()) for tensor in tensors]
        self._compare(state, scope, repr(said), _OTHER_BATCH)
        self._random = _random_states(state)
        self._are_equal = all_equal(scope, self._random)

    def end(self, state: ShardedModel) -> None:
        """Raise if the forward drew random numbers that differ between ranks. Collective: every rank of the mesh."""
        drawn = self._random != _random_states(state)
        said = self._random if any_of(self._scope(state), drawn) else ""
        self._compare(state, self._scope(state), said, _OTHER_SEED, equal=self._are_equal or not said)

    def _compare(self, state: ShardedModel, scope: Scope, said: str, advice: str, *, equal: bool | None = None) -> None:
        equal = all_equal(scope, said) if equal is None else equal
        if not any_of(state.scope, not equal):
            return
        found = gather_objects(scope, said)
        other = next((at for at, text in enumerate(found) if text != found[0]), None)
        ranks = dist.get_process_group_ranks(state.mesh.get_group(self._name))

        def refuse() -> None:
            if other is not None:
                raise RankMismatchError(
                    f"The ranks {ranks[0]} and {ranks[other]} are in one group of the axis {self._name!r}, and {advice}"
                )

        on_all_ranks(refuse, state.scope)

    def _scope(self, state: ShardedModel) -> Scope:
        return scope_of(state.mesh[self._name])


_OTHER_BATCH = (
    "were given different batches. Ranks of such a group compute one batch together: give each of them the batch "
    "of its mmfsdp.data_parallel_rank(model), of mmfsdp.data_parallel_size(model) in all."
)
_OTHER_SEED = (
    "drew different random numbers in forward, for example for dropout. Seed the ranks of such a group alike: "
    "torch.manual_seed(seed + mmfsdp.data_parallel_rank(model))."
)


def _axes(state: ShardedModel) -> list[str]:
    """Return the names of the dimensions of a model's mesh that are for model parallelism, if it has several ranks."""
    mesh = state.mesh
    names = mesh.mesh_dim_names or ()
    return [name for dim, name in enumerate(names) if axis_of(name) in MODEL_AXES and mesh.size(dim) > 1]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return two int64 sums over the bits of a tensor, on its device: plain, and weighted by position."""
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for words, begin in _words(tensor):
        at = torch.arange(begin + 1, begin + 1 + words.numel(), device=tensor.device)
        total[0] += words.sum(dtype=torch.int64)
        total[1] += (words.to(torch.int64) * at).sum()
    return total


def _words(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    flat = tensor.contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = flat.view(_WORDS[flat.element_size()])
    for begin in range(0, flat.numel(), _AT_ONCE):
        yield flat[begin : begin + _AT_ONCE], begin


def _random_states(state: ShardedModel) -> str:
    """Return a checksum of the states that random numbers are drawn from."""
    states = [torch.get_rng_state()]
    if (device := state.mesh.device_type) != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return hashlib.sha256(b"".join(bytes(found.numpy()) for found in states)).hexdigest()
