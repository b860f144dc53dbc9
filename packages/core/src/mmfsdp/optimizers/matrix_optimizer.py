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
from mmfsdp.optimizers.exchange import Message
from mmfsdp.optimizers.functions import MatrixFunction
from mmfsdp.optimizers.outcomes import NO_GRADIENT, UPDATED, Outcomes, updated_matrix
from mmfsdp.optimizers.owned_states import OwnedStates
from mmfsdp.optimizers.routes import Piece
from mmfsdp.optimizers.shards import local_of
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["BUCKET_BYTES", "MatrixOptimizer", "state_with_matrices"]

BUCKET_BYTES = 256 * 2**20
"""Bytes of the matrices that travel together, by default."""

MOMENTUM = "momentum_buffer"
"""The name of the only state that is kept per parameter, as in ``torch.optim.Muon``."""


class MatrixOptimizer(Optimizer):
    """Updates matrices by a function that needs them whole, with momentum and decoupled weight decay.

    Momentum stays sharded as its parameter is. In a step the shards of each matrix travel to its owner in one message
    per bucket, and the update travels back in one. The order of operations on elements is that of ``torch.optim.Muon``.

    `step` is collective: every rank of the parameters' meshes. Constructing it is not.

    Args:
        params: Parameters, pairs of names and parameters, or param groups, as `torch.optim.Optimizer` takes them.
            DTensors must be divided by rows, as ``fully_shard`` does.
        function: What is done with each matrix.
        defaults: Settings of param groups that lack them: ``lr``, ``momentum``, ``nesterov``, ``weight_decay``,
            ``parts``, ``is_stack``, and those of ``function``; see `matrix_optimizer`.
        mesh: The ranks that train parameters that are plain tensors, whole on each of them with the same gradients.
            None: only this rank does.
        names: Names of parameters by ``id()``, for errors. Default: those of the param groups.
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
        self._outcomes.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given: tuple[Bucket, Message] | None = None
        answered: tuple[Bucket, Message] | None = None
        for bucket in (*self._prepared(), None, None):
            # While the owners compute for one bucket, the next one and the answers of the one before are under way.
            next_given = None if bucket is None else (bucket, self._give(bucket))
            next_answered = None if given is None else (given[0], self._answer(*given))
            if answered is not None:
                self._apply(*answered)
            given, answered = next_given, next_answered
        self._outcomes.check_at_once()
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

    def _give(self, bucket: Bucket) -> Message:
        mixed = {id(member): self._mixed(member) for member in bucket.members}
        # Filled on the device: the host would wait for a copy.
        heads = {
            value: torch.full((1,), value, dtype=bucket.dtype, device=bucket.device) for value in (NO_GRADIENT, UPDATED)
        }

        def value_of(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
            member, _ = bucket.matrices[piece.place]
            value = mixed[id(member)]
            start, end = piece.span
            if value is None:
                return heads[NO_GRADIENT], torch.zeros(end - start, dtype=bucket.dtype, device=bucket.device)
            return heads[UPDATED], value[start:end]

        route = bucket.route
        return Message(bucket.group, route.given, route.collected, value_of, bucket.dtype, bucket.device)

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

    def _answer(self, bucket: Bucket, message: Message) -> Message:
        """Compute the updates of the matrices that this rank owns, and send them."""
        parts: dict[int, list[torch.Tensor]] = {}
        heads: dict[int, list[torch.Tensor]] = {}
        for _, piece, head, elements in message.pieces():
            parts.setdefault(piece.place, []).append(elements)
            heads.setdefault(piece.place, []).append(head)
        updates = {}
        for place, found in parts.items():
            member, matrix = bucket.matrices[place]
            whole = torch.cat(found).view(matrix.rows, matrix.columns)
            own = self._owned.of(id(member.param), matrix.start)
            has_gradient = member.param.grad is not None
            updates[place] = updated_matrix(
                self._function, whole, own, member, torch.stack(heads[place]), has_gradient, self._outcomes
            )

        def value_of(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
            head, update = updates[piece.place]
            return head, update.reshape(-1)[slice(*piece.span)]

        route = bucket.route
        return Message(bucket.group, route.answered, route.returned, value_of, bucket.dtype, bucket.device)

    def _apply(self, bucket: Bucket, message: Message) -> None:
        """Change this rank's shards by the updates."""
        found: dict[int, torch.Tensor] = {}
        codes: dict[int, torch.Tensor] = {}
        for _, piece, head, elements in message.pieces():
            found[piece.place], codes[piece.place] = elements, head
        places: dict[int, list[int]] = {}
        for place, (member, _) in enumerate(bucket.matrices):
            places.setdefault(id(member), []).append(place)
        for member in bucket.members:
            settings = member.settings
            if member.param.grad is None:
                continue
            local, lr = local_of(member.param), float(settings["lr"])
            local.mul_(1 - lr * settings["weight_decay"])
            if mine := places.get(id(member)):
                _, matrix = bucket.matrices[mine[0]]  # all matrices of a parameter have the same shape
                size = self._function.step_size(lr, matrix.rows, matrix.columns, settings)
                update = torch.cat([found[place] for place in mine])
                local.add_(update.to(local.device).view_as(local), alpha=-size)
        self._outcomes.note([member.name for member, _ in bucket.matrices], bucket.owners, codes)


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
