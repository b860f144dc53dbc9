"""Installs the hooks that report forwards, backwards and reads of parameters to a sharded model's state."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.calls.unit_gates import ShardGate
from mmfsdp.runtime.calls.unit_parts import UnitParts
from mmfsdp.runtime.dtensors import data_mesh
from mmfsdp.runtime.fsdp1.flat_params import flat_params
from mmfsdp.runtime.gathered.other_weights import refuse_other_weights
from mmfsdp.runtime.gradients.agreement import GradientAgreement
from mmfsdp.runtime.gradients.graph_inputs import RefuseSecondOrder, RefuseShardGradients, check_graph_inputs
from mmfsdp.runtime.gradients.hidden_outputs import HiddenOutputs, ReduceAlways, show_tensors, tensors_in
from mmfsdp.runtime.refusals.forward_errors import explain_forward_error
from mmfsdp.runtime.refusals.frameworks import guard_save_pretrained, refuse_copies, refuse_resizing, watch_wrappers
from mmfsdp.runtime.refusals.guards import watch_optimizers
from mmfsdp.runtime.refusals.split_backwards import check_gathered, is_split_backward
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.stored_codes import refuse_codes
from mmfsdp.runtime.torch_fsdp2.observing import subscribe
from mmfsdp.runtime.torch_fsdp2.random_numbers import draw_as_whole
from mmfsdp.runtime.torch_fsdp2.state_dict_hooks import keep_state_dicts_pure

__all__ = ["install_hooks", "watch_shards"]


def install_hooks(state: ShardedModel, parts: Iterable[UnitParts]) -> None:
    """Install the hooks that keep a sharded model's state up to date. Not collective.

    They also make units, the methods of units that the plan lists, and layers inside units callable from anywhere.

    Args:
        state: The model's state; the hooks keep only weak references to it.
        parts: The result of `parts_of_units` before the model was sharded.
    """
    me, module = weakref.ref(state), state.module

    def before(_: nn.Module, args: Any) -> None:
        if (live := me()) is not None:
            live.before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if (live := me()) is not None:
            # If forward failed, torch calls this hook in an except block, without an output.
            _end_forward(live, output, sys.exception() if output is None else None)

    # Not compiled: the model may be, with fullgraph=True.
    module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True)
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)
    _watch_gradients(state, me)
    begin = _begin_at_root(state)
    begins = [(part, _nothing if part.unit.is_root else begin) for part in parts]
    for (part, _), gate in zip(begins, state.engine.watch(state, begins), strict=True):
        gate.route(part.holders)
        for unit in part.modules:
            gate.open_to_methods(unit, part.unit.forward_methods)
    refuse_codes(module)
    refuse_resizing(module)
    watch_optimizers()
    watch_wrappers()


def watch_shards(state: ShardedModel, parts: Iterable[tuple[UnitParts, Callable[[], None]]]) -> list[ShardGate]:
    """Install the hooks of a model whose parameters are DTensors, and return the gates of units. Not collective.

    See `mmfsdp.runtime.engine.Engine.watch`.
    """
    me, module = weakref.ref(state), state.module
    guard_save_pretrained(module)
    refuse_copies(module)
    for group in state.groups:
        keep_state_dicts_pure(group)
    draw_as_whole(state.mesh, data_mesh(state.mesh))
    subscribe(RefuseSecondOrder(), state.groups)
    subscribe(ReduceAlways(module), state.groups)
    subscribe(state.copied_settings, state.groups)
    subscribe(RefuseShardGradients(), state.groups)
    refuse_other_weights(module, state.groups)
    _show_shards(module, me, weakref.ref(module))
    _watch_mode(module, me, weakref.ref(module))
    module.register_load_state_dict_pre_hook(_refuse_whole_tensors)
    gates = []
    for part, begin in parts:
        members: list[nn.Module] = [module for module in part.owned if isinstance(module, FSDPModule)]
        hidden = HiddenOutputs(members[0], part.owned, show_tensors)
        gates.append(gate := ShardGate(members, hidden, begin, full_precision=part.unit.precision.full_precision))
        if part.unit.is_root:
            gate.run = _as_forward(gate.run, me)  # type: ignore[method-assign]
    return gates


def _end_forward(state: ShardedModel, output: Any, error: BaseException | None) -> None:
    if error is not None:
        explain_forward_error(error, state)
    state.after_forward(failed=error is not None)
    if error is None and not state.is_graph_checked and torch.is_grad_enabled() and not state.is_running:
        state.is_graph_checked = True
        shards = {id(param): clean_fqn(name) for name, param in state.module.named_parameters()}
        check_graph_inputs(tensors_in(output), shards)


def _show_shards(module: nn.Module, me: weakref.ref[ShardedModel], root: weakref.ref[nn.Module]) -> None:
    """Make ``parameters()`` of the root yield shards at all times, and keep gathered units gathered."""
    original = type(module).named_parameters

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        live, this = me(), root()
        params = original(this, *args, **kwargs)  # type: ignore[arg-type]
        if live is not None and is_split_backward():
            check_gathered(live.groups)
            yield from params
            return
        # Code inside a forward or backward computes with gathered parameters.
        gathered = live.gathered() if live is not None and live.parameters_are_settled() else {}
        for name, param in params:
            yield name, gathered[id(param)][1] if id(param) in gathered else param

    module.named_parameters = named_parameters  # type: ignore[method-assign]


def _refuse_whole_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise if ``load_state_dict()`` gets whole tensors: torch fails, or puts them in with ``assign=True``."""
    for name, param in module.named_parameters():
        given = state_dict.get(prefix + name)
        if isinstance(param, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
            raise StateDictError(
                f"load_state_dict() of a sharded model takes shards, and {prefix + name!r} is a whole tensor. Use "
                "mmfsdp.load_model_state_dict(model, state_dict) on every rank; with from_rank0=True only the first "
                "rank needs the tensors."
            )


def _watch_mode(module: nn.Module, me: weakref.ref[ShardedModel], root: weakref.ref[nn.Module]) -> None:
    original = type(module).train

    def train(mode: bool = True) -> nn.Module:
        if (live := me()) is not None:
            live.before_mode()
        this = root()
        assert this is not None  # it is being called
        return original(this, mode)

    module.train = train  # type: ignore[method-assign]


def _watch_gradients(state: ShardedModel, me: weakref.ref[ShardedModel]) -> None:
    """Make each reduction of gradients complete them at its end."""
    trained = [param for param in state.whole_params if param.requires_grad]
    if not state.groups and not trained:
        return

    def is_reduced() -> bool:
        if (live := me()) is None:
            return False
        if live.unreduced and live.groups:  # kept by earlier backwards, and reduced now
            live.unreduced = not live.reduces
        return not live.unreduced

    def begin(_: torch.Tensor) -> None:
        if (live := me()) is not None and live.agreement is not None and not live.unreduced and live.reduces:
            live.agreement.begin()

    def kept() -> None:
        if (live := me()) is not None:
            live.unreduced = True

    state.agreement = GradientAgreement(state.mesh, state.groups, trained, is_reduced, kept)
    for param in trained:
        param.register_post_accumulate_grad_hook(begin)
    for flat in flat_params(state.module):
        # A rank may use no whole parameter, but it always uses flat ones.
        if flat.requires_grad:
            flat.register_hook(begin)


def _begin_at_root(state: ShardedModel) -> Callable[[], None]:
    """Return what makes units callable before their root: torch takes the first module that runs as the root."""
    me = weakref.ref(state)
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun and (live := me()) is not None:
            begun = True
            live.engine.begin_root(live)

    return begin


def _nothing() -> None:
    pass


def _as_forward(method: Any, me: weakref.ref[ShardedModel]) -> Any:
    """Return a method of the root that is treated as a forward, although no hook sees its calls."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        live = me()
        if live is None:
            return method(*args, **kwargs)
        live.before_forward()
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            _end_forward(live, None, error)
            raise
        _end_forward(live, output, None)
        return output

    return call
