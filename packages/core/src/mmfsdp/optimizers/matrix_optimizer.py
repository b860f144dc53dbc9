"""An optimizer whose updates need whole matrices: each is gathered on the rank that owns it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from mmfsdp.collective.scopes import Scope
from mmfsdp.errors import ShardStateError
from mmfsdp.optimizers.buckets import Bucket, Member, buckets_of
from mmfsdp.optimizers.exchange import AllToAll, Parcel
from mmfsdp.optimizers.functions import MatrixFunction
from mmfsdp.optimizers.outcomes import NO_GRADIENT, ON_SOME_RANKS, UPDATED, Outcomes, updated_matrix
from mmfsdp.optimizers.owned_states import OwnedStates
from mmfsdp.optimizers.shards import local_of
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["BUCKET_BYTES", "MatrixOptimizer", "loss_of", "state_with_matrices"]

BUCKET_BYTES = 256 * 2**20
"""Bytes of the matrices that travel together, by default."""

MOMENTUM = "momentum_buffer"
"""The name of the only state that is kept per parameter, as in ``torch.optim.Muon``."""


class MatrixOptimizer(Optimizer):
    """Updates matrices by a function that needs them whole, with momentum and decoupled weight decay.

    Momentum stays sharded as its parameter is. In a step the shards of each matrix travel to its owner in one message
    per bucket, and the update travels back in one. Operations on elements have the order of ``torch.optim.Muon``.

    `step` is collective: every rank of the parameters' meshes. Constructing it is not.

    Args:
        params: Parameters, pairs of names and parameters, or param groups, as `torch.optim.Optimizer` takes them.
            DTensors must be divided by rows, as ``fully_shard`` does.
        function: What is done with each matrix.
        defaults: Settings of param groups that lack them: ``lr``, ``momentum``, ``nesterov``, ``weight_decay``,
            ``parts``, ``is_stack``, and the settings of ``function``; see `matrix_optimizer`.
        mesh: The ranks that train parameters that are plain tensors, whole on each of them with the same gradients.
            None: only this rank does.
        names: Names of parameters by ``id()``, for errors. Default: the names in the param groups.
        bucket_bytes: The most that the matrices of a bucket take in messages; a larger parameter is one of its own.
    """

    def __init__(
        self,
        params: Any,
        function: MatrixFunction,
        defaults: dict[str, Any],
        *,
        mesh: DeviceMesh | None = None,
        names: Mapping[int, str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(params, defaults)
        self._function, self._mesh, self._names, self._bucket_bytes = function, mesh, dict(names or {}), bucket_bytes
        self._buckets: list[Bucket] = []
        self._prepared_for: Any = None
        self._owned = OwnedStates()
        self._outcomes = Outcomes()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. Collective: every rank of the parameters' meshes.

        Args:
            closure: Computes the loss and the gradients.

        Raises:
            OptimizerStepError: The update of a matrix was not finite or could not be computed, or only some ranks have
                a gradient of it; raised on every rank. That matrix only decays, all others are updated. On an
                accelerator the next step raises it, as the host does not wait for the device.
            RankMismatchError: In the first step: ranks have other parameters; raised on every rank.
            LostRankError: Not all ranks take part.
        """
        loss = loss_of(closure)
        self._update_matrices()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`. Every rank must add the same parameters before its next step."""
        super().add_param_group(param_group)

    def bind(self, model: nn.Module) -> None:
        """Take the mesh and the names of a sharded model whose parameters the param groups now hold. Not collective.

        For an optimizer that was built before its model was sharded, as MMEngine builds it.

        Args:
            model: The sharded model.

        Raises:
            ShardStateError: The model is not sharded, or by engine ``fsdp1``, whose parameters have no matrices.
        """
        state = state_with_matrices(model)
        self._mesh, self._names = state.mesh, {id(param): fqn for fqn, param in state.module.named_parameters()}
        self._prepared_for = None
        self._owned = OwnedStates()

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`, with what the function keeps for each matrix that this rank owns.

        `mmfsdp.optim_state_dict` returns what the function keeps on all ranks.
        """
        return self._owned.add_to(super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `torch.optim.Optimizer.load_state_dict`; what the function keeps has the dtypes that it was saved in."""
        rest, self._owned = OwnedStates.taken_from(state_dict, self.param_groups)
        super().load_state_dict(rest)
        self._prepared_for = None

    def share_state(self, scope: Scope) -> AbstractContextManager[None]:
        """Let `state_dict` return what functions keep on all ranks. Collective: every rank of the scope.

        Raises:
            StateDictError: A function keeps what no checkpoint can bring back; raised on every rank.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        return self._owned.shared(scope, params, {**_names_in(self.param_groups), **self._names})

    def matrix_groups(self) -> list[dict[str, Any]]:
        """Return the param groups whose matrices the function updates."""
        return self.param_groups

    def _update_matrices(self) -> None:
        """Step, without the hooks that torch runs around each ``step()``, which a subclass's own would run twice."""
        self._outcomes.check()
        given: tuple[Bucket, AllToAll] | None = None
        answered: tuple[Bucket, AllToAll] | None = None
        for bucket in (*self._prepared(), None, None):
            # While the owners compute for one bucket, the next one and the answers of the one before are under way.
            next_given = None if bucket is None else (bucket, self._give(bucket))
            next_answered = None if given is None else (given[0], self._answer(*given))
            if answered is not None:
                self._apply(*answered)
            given, answered = next_given, next_answered
        self._outcomes.check_at_once()

    def _prepared(self) -> list[Bucket]:
        groups = self.matrix_groups()
        key = [(id(param), group["parts"], group["is_stack"]) for group in groups for param in group["params"]]
        settings = [id(group) for group in groups]  # loading a state replaces them
        if self._prepared_for != (key, settings):
            names = {**_names_in(groups), **self._names}
            self._buckets = buckets_of(groups, names, self._function, self._mesh, self._bucket_bytes)
            self._prepared_for = key, settings
            self._owned.keep(
                {
                    (id(member.param), matrix.start): bucket.device
                    for bucket in self._buckets
                    for owner, (member, matrix) in zip(bucket.owners, bucket.matrices, strict=True)
                    if owner == bucket.rank
                }
            )
        return self._buckets

    def _give(self, bucket: Bucket) -> AllToAll:
        """Send this rank's parts of all matrices to their owners."""
        parcel = Parcel(bucket.route.given, bucket.dtype, bucket.device)
        for heads in parcel.heads():
            heads.fill_(UPDATED)  # on the device: the host would wait for a copy
        parts = parcel.parts()
        for member, indices in bucket.members:
            mixed = self._mixed(member)
            for [(piece, elements)] in (parts[index] for index in indices):
                if mixed is None:
                    parcel.head(bucket.owners[piece.index], piece.index).fill_(NO_GRADIENT)
                    elements.zero_()
                else:
                    elements.copy_(mixed[slice(*piece.span)])
        return AllToAll(bucket.group, parcel, bucket.route.collected)

    def _mixed(self, member: Member) -> torch.Tensor | None:
        """Advance the momentum of a parameter; return this rank's part of what updates come from, flattened."""
        if member.param.grad is None:
            return None
        state, settings = self.state[member.param], member.settings
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(member.param.grad, memory_format=torch.preserve_format)
        grad, kept = local_of(member.param.grad), local_of(state[MOMENTUM])
        kept.lerp_(grad, 1 - settings["momentum"])
        return (grad.lerp(kept, settings["momentum"]) if settings["nesterov"] else kept).reshape(-1)

    def _answer(self, bucket: Bucket, message: AllToAll) -> AllToAll:
        """Compute the updates of the matrices that this rank owns, and send them."""
        return AllToAll(bucket.group, self._updates(bucket, message.receive()), bucket.route.returned)

    def _updates(self, bucket: Bucket, received: Parcel) -> Parcel:
        parcel = Parcel(bucket.route.answered, bucket.dtype, bucket.device)
        owned = bucket.route.owned
        if not owned:
            return parcel
        heads = torch.stack(received.heads())
        are_alike = (heads == heads[0]).all(0)
        parts, answers, codes = received.parts(), parcel.parts(), []
        for index, is_alike in zip(owned, are_alike, strict=True):
            member, matrix = bucket.matrices[index]
            whole = torch.cat([elements for _, elements in parts[index]]).view(matrix.rows, matrix.columns)
            own = self._owned.of(id(member.param), matrix.start)
            code, update = updated_matrix(self._function, whole, own, member, is_alike, self._outcomes)
            for piece, elements in answers[index]:
                elements.copy_(update.reshape(-1)[slice(*piece.span)])
            codes.append(code)
        for said in parcel.heads():
            said.copy_(torch.stack(codes))
        return parcel

    def _apply(self, bucket: Bucket, message: AllToAll) -> None:
        """Change this rank's shards by the updates."""
        received = message.receive()
        parts = received.parts()
        for member, indices in bucket.members:
            settings = member.settings
            local, lr = local_of(member.param), float(settings["lr"])
            kept = 1 - lr * settings["weight_decay"]
            if member.param.grad is None:
                if indices:  # replicas stay equal if others have a gradient
                    code = received.head(bucket.owners[indices[0]], indices[0])
                    local.mul_(torch.where(code == ON_SOME_RANKS, kept, 1.0).to(local.device))
                continue
            local.mul_(kept)
            if indices:
                _, matrix = bucket.matrices[indices[0]]  # all matrices of a parameter have the same shape
                size = self._function.step_size(lr, matrix.rows, matrix.columns, settings)
                update = torch.cat([elements for index in indices for _, elements in parts[index]])
                local.add_(update.to(local.device).view_as(local), alpha=-size)
        pieces = [piece for own in received.pieces for piece in own]
        names = [bucket.matrices[piece.index][0].name for piece in pieces]
        owners = [bucket.owners[piece.index] for piece in pieces]
        self._outcomes.note(names, owners, torch.cat(received.heads()))


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure of ``step()`` returns; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def state_with_matrices(model: nn.Module) -> ShardedModel:
    """Return the state of a sharded model whose parameters are divided by rows. Not collective.

    Raises:
        ShardStateError: The model is not sharded, or by engine ``fsdp1``.
    """
    state = find_sharded_model(model)
    if state.is_fsdp1:
        raise ShardStateError(
            "Engine 'fsdp1' shows pieces of flat parameters, which have no rows. Shard the model by engine 'fsdp2'."
        )
    return state


def _names_in(groups: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    return {
        id(param): name
        for group in groups
        for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
    }
