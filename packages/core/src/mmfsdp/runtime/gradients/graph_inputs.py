"""Refuses graphs whose gradients would be wrong: with shards as arguments of autograd functions, or of second order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable

from mmfsdp.basics.text import name_list
from mmfsdp.errors import ShardStateError, UnsupportedCallError
from mmfsdp.runtime.fsdp1.flat_params import flat_handles, flat_units
from mmfsdp.runtime.gradients.backward import is_backward
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, name_of, shards_of
from mmfsdp.runtime.torch_fsdp2.unreduced import has_gradient

__all__ = ["RefuseSecondOrder", "RefuseShardGradients", "check_graph_inputs", "refuse_flat_gradients"]


_REMEDY = (
    "Leave the module out of the wrap policy, so that the unit around it gathers it, or keep it whole with "
    "sharding.ignored_modules."
)


def check_graph_inputs(outputs: Iterable[torch.Tensor], shards: Mapping[int, str]) -> None:
    """Check that no autograd function of a user got a shard of a parameter. Not collective.

    Adjoint methods pass ``*module.parameters()`` to such a function and differentiate by them in backward. While the
    module's unit is not gathered these are shards, which no computation uses: all gradients would be zero.

    Args:
        outputs: The outputs of a forward.
        shards: The names of the model's registered shards, by ``id``.

    Raises:
        UnsupportedCallError: A function got one.
    """
    given = [(type(node).__name__, shards[id(value)]) for node, value in _given(outputs) if id(value) in shards]
    if given:
        function = given[0][0].removesuffix("Backward")
        names = {name for _, name in given}
        raise UnsupportedCallError(
            f"The autograd function {function} got {name_list(sorted(names), 3)} as arguments, as adjoint methods do "
            "with *module.parameters(). These are shards, as the module is a shard unit of its own that is not "
            f"gathered there, and their gradients would silently be zero. {_REMEDY}"
        )


class RefuseShardGradients(Subscriber):
    """Raises in a backward whose autograd functions got shards, wherever `check_graph_inputs` cannot see them.

    Such a function runs a unit in backward, with gathered copies that get no gradient, and returns gradients of shards,
    which nothing else gives a unit that runs then.
    """

    turn = Turn.REFUSING

    def __init__(self) -> None:
        self._ran: dict[int, tuple[Group, list[object]]] = {}

    def before_forward(self, group: Group) -> None:
        """Note a unit that runs in a backward, and what gradients its shards have. Checkpoints run units there, too."""
        if torch.is_grad_enabled() and is_backward() and id(group) not in self._ran:
            if not self._ran:
                Variable._execution_engine.queue_callback(self._check)
            self._ran[id(group)] = group, _gradients(group)

    def before_reduce(self, group: Group) -> None:
        """Forget a unit that got gradients."""
        if self._ran and id(group) in self._ran and has_gradient(group):
            del self._ran[id(group)]

    def _check(self) -> None:
        ran, self._ran = [*self._ran.values()], {}
        for group, before in ran:
            if _gradients(group) != before:
                raise _error(name_of(group))


def refuse_flat_gradients(module: nn.Module) -> None:
    """Raise from now on where `RefuseShardGradients` does, for flat parameters. Not collective.

    Args:
        module: The sharded root; without effect if it has no FullyShardedDataParallel.
    """
    for (name, handle), unit in zip(flat_handles(module), flat_units(module), strict=True):
        unit.register_forward_pre_hook(torch.compiler.disable(_FlatGradients(name, handle.flat_param).note))


class _FlatGradients:
    """Looks at the gradients of a unit of FSDP1 in a backward that runs its forward.

    Args:
        name: FQN of the unit.
        flat: Its flat parameter. Forwards compute with views of it, and only a penalty on parameters, or an autograd
            function that got them, gives gradients to the parameters in it.
    """

    def __init__(self, name: str, flat: Any) -> None:
        self._name = name
        self._flat = weakref.ref(flat)
        self._hooks: list[Any] = []
        self._is_flat_used = self._are_params_used = False

    def note(self, *_: Any) -> None:
        """Call it before each forward of the unit."""
        if torch.is_grad_enabled() and is_backward() and not self._hooks and (flat := self._flat()) is not None:
            self._is_flat_used = self._are_params_used = False
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._use_params)
                for param in flat._params or ()
                if param.requires_grad
            ]
            if self._hooks:
                self._hooks.append(flat.register_hook(self._use_flat))
                Variable._execution_engine.queue_callback(self._check)

    def _use_params(self, _: torch.Tensor) -> None:
        self._are_params_used = True

    def _use_flat(self, _: torch.Tensor) -> None:
        self._is_flat_used = True

    def _check(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._are_params_used and not self._is_flat_used:
            raise _error(self._name)


def _error(unit: str) -> UnsupportedCallError:
    return UnsupportedCallError(
        f"Shards of the unit {unit!r} got gradients from an autograd function that runs the unit in backward, as "
        "adjoint methods do with *module.parameters(). The unit computes with gathered copies, so these gradients are "
        f"zero or wrong. {_REMEDY}"
    )


def _gradients(group: Group) -> list[object]:
    """Return what changes whenever autograd adds to a gradient of a shard."""
    grads = [shard.grad for shard in shards_of(group)]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


def _given(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each autograd function written in Python, except torch's own, with the parameters that it got."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        is_users = (written := getattr(node, "_forward_cls", None)) and not written.__module__.startswith("torch.")
        for before, _ in node.next_functions:
            if before is None:
                continue
            if is_users and (variable := getattr(before, "variable", None)) is not None:
                yield node, variable
            if before not in seen:
                seen.add(before)
                waiting.append(before)


class RefuseSecondOrder(Subscriber):
    """Raises in a backward with ``create_graph=True`` that reaches a unit.

    A unit is gathered for its backward and freed right after it. The backward of that backward reads the weights again,
    at a point where torch has no hook: it fails, or ends the process.
    """

    turn = Turn.REFUSING

    def before_backward(self, group: Group) -> None:
        """Raise if gradients are recorded.

        Raises:
            ShardStateError: The backward records gradients.
        """
        if torch.is_grad_enabled():  # in a backward only with create_graph
            raise ShardStateError(
                f"A backward with create_graph=True, as in a gradient penalty, reached the shard unit "
                f"{name_of(group)!r}: the weights are freed after it, and the second backward would read them. Keep "
                "the modules whole that are differentiated twice: list them in sharding.ignored_modules. Their "
                "gradients are averaged over ranks."
            )
