"""Compiles units of a rehearsal as Inductor would, up to the code: graphs, what they keep for backward, and kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.fx import GraphModule, Interpreter, Node

from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import RehearsalError
from mmfsdp.planning.compiled import around_compiled, is_compiled
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.fakes.compiling import compiles
from mmfsdp.rehearsal.fakes.fake import compiler_of, tensors_in
from mmfsdp.rehearsal.recording.kernels.fusing import Kernel, kernels_of
from mmfsdp.rehearsal.recording.recorder import Recorder

__all__ = ["CompiledGraphs", "compiled_graphs"]


@contextmanager
def compiled_graphs(plan: ShardPlan, model: nn.Module) -> Iterator[CompiledGraphs | None]:
    """Let ``torch.compile`` use the compiler of a rehearsal, whatever backend it was given.

    Graphs that other code has compiled are made anew when they are called again.

    Args:
        plan: The plan.
        model: The copy of the model that is rehearsed. Modules that the user compiled are compiled again, because
            copies are not.

    Yields:
        The graphs; None if nothing is compiled, or only run eagerly.
    """
    if not (plan.compile or plan.compiled_already):
        yield None
    elif not compiles(plan):
        with torch.compiler.set_stance("force_eager"):
            yield None
    else:
        for fqn in plan.compiled_already:
            if not is_compiled(part := model.get_submodule(fqn)):
                part.compile()
        graphs = CompiledGraphs()
        torch.compiler.reset()
        try:
            with torch.compiler.set_stance("default", force_backend=compiler_of(graphs.compile)):
                yield graphs
        finally:
            torch.compiler.reset()


class CompiledGraphs:
    """The compiler of a rehearsal: torch's own, except that graphs run on shapes, and a recorder sees their kernels.

    Dynamo finds the graphs, and the partitioner decides what is kept for backward, as in training. What a graph
    computes in one kernel is one operator, and only what a kernel writes is allocated.
    """

    def __init__(self) -> None:
        self._runs = 0
        self._recorder: Recorder | None = None

    def watch(self, model: nn.Module, recorder: Recorder) -> None:
        """Record graphs from now on, and raise where a compiled module of the model runs without any.

        Args:
            model: A model that is sharded and compiled.
            recorder: What records.

        Raises:
            RehearsalError: When the module runs.
        """
        self._recorder = recorder
        for fqn, module in model.named_modules():
            if is_compiled(module):
                around_compiled(module, functools.partial(self._checked, clean_fqn(fqn)))

    def _checked(self, fqn: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._runs
            output = call(*args, **kwargs)
            if self._runs == before:
                raise RehearsalError(
                    "The module is compiled, but torch ran all of it eagerly, so compiling it gains nothing in "
                    "training either. Run your program with TORCH_LOGS=graph_breaks to see why, or set "
                    "compile.fullgraph, which raises there.",
                    fqn=fqn,
                )
            return output

        return run

    def compile(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        """Return what runs a graph, as `compiler_of` asks for it."""
        kernels, within = kernels_of(graph.graph)

        def run(args: list[Any]) -> Any:
            self._runs += 1
            return _Run(graph, kernels, within, self._recorder).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # it empties the list, so that what was kept is freed
        return run


class _Run(Interpreter):
    """One run of a graph."""

    def __init__(
        self, graph: GraphModule, kernels: dict[Node, Kernel], within: set[Node], recorder: Recorder | None
    ) -> None:
        super().__init__(graph)
        self._kernels, self._within, self._recorder = kernels, within, recorder
        self._sizes: dict[Node, int] = {}
        self._made: list[torch.Tensor] = []

    def boxed_run(self, args_list: list[Any]) -> Any:
        inputs = (node for node in self.graph.nodes if node.op == "placeholder")
        self._sizes = {node: _size(value) for node, value in zip(inputs, args_list, strict=True)}
        return super().boxed_run(args_list)

    def run_node(self, n: Node) -> Any:
        recorder = self._recorder
        if recorder is None or recorder.is_paused:
            return super().run_node(n)
        if self._made:  # what was used for the last time by the kernel before is gone by now: it is overwritten
            recorder.note_new(self._made)
            self._made = []
        kernel = self._kernels.get(n)
        if kernel is None and n not in self._within:
            result = super().run_node(n)
        else:
            with recorder.paused():
                result = super().run_node(n)
        found = tensors_in((result,))
        self._sizes[n] = _size(found)
        if kernel is not None:
            if n in kernel.written:
                self._made = found
            if n is kernel.nodes[-1]:
                moved = sum(self._sizes.get(node, 0) for node in kernel.reads | kernel.written)
                recorder.note_kernel(moved, found)
        return result


def _size(value: Any) -> int:
    """Return the bytes of memory that a value's tensors look at."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors_in((value,)))
