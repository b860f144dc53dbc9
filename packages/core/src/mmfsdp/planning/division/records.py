"""The record of how tensor parallelism divides one module, and what follows for its parameters. Torch-free."""

from __future__ import annotations

from typing import Literal

from mmfsdp.planning.plan_records import Record

__all__ = ["ModuleDivision"]

_Layout = Literal["replicate", "sequence", "heads", "features"] | None


class ModuleDivision(Record):
    """How the axis ``tensor`` divides a linear layer or an embedding, what a norm sees of its input; or experts."""

    fqn: str
    style: Literal["colwise", "rowwise", "sequence", "experts"]
    input: _Layout
    output: _Layout

    def divided(self, param: str, *, is_embedding: bool) -> tuple[tuple[str, int], ...]:
        """Return what divides a parameter of the module, as ``ParamEntry.divided`` does.

        Args:
            param: Name of the parameter in the module, ``'weight'`` or ``'bias'``.
            is_embedding: Whether the module is an embedding, whose rows are its inputs.
        """
        if self.style == "experts":
            return (("expert", 0),)
        if self.style == "sequence" or (self.style == "rowwise" and param == "bias"):
            return ()
        is_first = (self.style == "colwise") != is_embedding
        return (("tensor", 0 if is_first else 1),)
