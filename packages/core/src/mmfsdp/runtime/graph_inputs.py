"""Refuses shards as arguments of autograd functions, whose gradients would be zero or those of one rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mmfsdp.basics.text import name_list
from mmfsdp.errors import UnsupportedCallError

__all__ = ["check_graph_inputs"]


def check_graph_inputs(outputs: Iterable[torch.Tensor], shards: Mapping[int, str]) -> None:
    """Check that no autograd function of a user got a shard of a parameter. Not collective.

    Adjoint methods pass ``*module.parameters()`` to such a function and differentiate by them in backward. While the
    module's unit is not gathered these are shards, which no computation uses: all gradients would be zero.

    Args:
        outputs: What a forward returned.
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
            "gathered there, and their gradients would silently be zero. Leave the module out of the wrap policy, so "
            "that the unit around it gathers it, or keep it whole with sharding.ignored_modules."
        )


def _given(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the functions written in Python, without those of torch, with the parameters that each of them got."""
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
