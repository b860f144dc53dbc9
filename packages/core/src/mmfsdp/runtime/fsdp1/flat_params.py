"""The private parts of torch's FSDP1 that this library uses: flat parameters, and where each parameter lies in them.

A FullyShardedDataParallel joins the parameters of its module into one flat parameter. Each rank holds a piece of it.
torch has no public function that frees a gathered flat parameter, or that says where a parameter lies in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.lost_ranks import Waiting

__all__ = [
    "FlatPiece",
    "around_flat_forward",
    "around_gathering",
    "flat_handles",
    "flat_param_names",
    "flat_params",
    "flat_pieces",
    "flat_units",
    "free_flat_params",
    "is_flat_gathered",
    "keep_param_order",
    "name_gathering",
    "watch_flat_units",
]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The elements of one parameter that this rank holds: a run of its elements in row-major order."""

    target: torch.Tensor
    """Shape (n,), a view of the flat parameter's shard; n is 0 where other ranks hold all elements."""
    start: int
    """Index of the run's first element in the parameter."""
    shape: torch.Size
    """Shape of the whole parameter."""


def flat_params(module: nn.Module) -> list[Any]:
    """Return the flat parameters of a model; an empty list if no FullyShardedDataParallel is in it."""
    return [unit._handle.flat_param for _, unit in _units(module)]  # type: ignore[union-attr]


def flat_handles(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the FQN of each unit that holds a flat parameter, and torch's handle of it; outer units come first."""
    return [(start.rstrip("."), unit._handle) for start, unit in _units(module)]


def flat_units(module: nn.Module) -> list[FullyShardedDataParallel]:
    """Return each unit that holds a flat parameter, in the order of `flat_handles`."""
    return [unit for _, unit in _units(module)]


def is_flat_gathered(module: nn.Module) -> bool:
    """Tell whether a flat parameter of the model is gathered."""
    handles: list[Any] = [unit._handle for _, unit in _units(module)]
    return any(
        handle.flat_param.data_ptr() != handle.flat_param._local_shard.data_ptr()
        for handle in handles
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard")
    )


def free_flat_params(module: nn.Module) -> None:
    """Free the flat parameters that are gathered. Not collective.

    torch keeps the root gathered after a forward without gradients, until the next backward. The next forward would not
    see values written to the shards in the meantime.
    """
    for _, unit in _units(module):
        handle: Any = unit._handle
        if not hasattr(handle.flat_param, "_local_shard"):
            continue  # no forward ran yet
        if handle.uses_sharded_strategy and handle._training_state == HandleTrainingState.IDLE:
            handle.reshard(True)
            handle.post_reshard()
            handle._prefetched = False


def keep_param_order(model: nn.Module, order: Mapping[nn.Module, Sequence[str]]) -> None:
    """Let modules list their parameters in a given order. Not collective.

    With ``use_orig_params`` torch registers the parameters of a flat parameter anew, behind those that it does not
    hold, at every gathering and freeing. An optimizer would then number them otherwise than the unsharded model's.

    Args:
        model: The sharded root.
        order: For each module, the names of its own parameters before sharding.
    """
    for _, unit in _units(model):
        if unit._use_orig_params:
            _keep_order(unit._handle, order)


def _keep_order(handle: Any, order: Mapping[nn.Module, Sequence[str]]) -> None:
    flat = handle.flat_param
    modules = dict.fromkeys(info.module for info in (*flat._param_infos, *flat._shared_param_infos))
    mixed = [module for module in modules if [*module._parameters] != [*order[module]]]
    if not mixed:
        return

    def restore() -> None:
        for module in mixed:
            for name in order[module]:
                if name in module._parameters:
                    module._parameters[name] = module._parameters.pop(name)

    def restoring(register: Callable[..., None]) -> Callable[..., None]:
        def register_in_order(*args: Any, **kwargs: Any) -> None:
            register(*args, **kwargs)
            restore()

        return register_in_order

    handle._use_sharded_views = restoring(handle._use_sharded_views)
    handle._use_unsharded_views = restoring(handle._use_unsharded_views)
    restore()


def name_gathering(module: nn.Module) -> None:
    """Make errors of lost ranks name the unit that was being gathered, in forward and in backward."""
    for _, unit in _units(module):
        _name_gathering(unit._handle)


def _name_gathering(handle: Any) -> None:
    unshard, name = handle.unshard, type(handle._fully_sharded_module).__name__

    def unshard_and_name() -> None:
        with Waiting(f"gathering a shard unit ({name})"):
            unshard()

    handle.unshard = unshard_and_name


def around_gathering(module: nn.Module, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function that gathers each flat parameter of a model by ``wrap(FQN of its unit, that function)``."""
    for start, unit in _units(module):
        handle: Any = unit._handle
        handle.unshard = wrap(start.rstrip("."), handle.unshard)


def watch_flat_units(
    module: nn.Module, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], reducing: Callable[[str], None]
) -> Callable[[], None]:
    """Do as `around_gathering`, and call ``reducing(FQN of the unit)`` before its gradient is reduced.

    Returns:
        A function that undoes it.
    """
    before = [(unit._handle, unit._handle.unshard) for _, unit in _units(module)]  # type: ignore[union-attr]
    around_gathering(module, wrap)
    hooks = []
    for start, unit in _units(module):
        flat: Any = unit._handle.flat_param  # type: ignore[union-attr]
        if flat.requires_grad:
            hooks.append(flat.register_hook(functools.partial(_call_with_name, reducing, start.rstrip("."))))

    def undo() -> None:
        for handle, gather in before:
            handle.unshard = gather  # type: ignore[union-attr, method-assign]
        for hook in hooks:
            hook.remove()

    return undo


def _call_with_name(reducing: Callable[[str], None], name: str, _: torch.Tensor) -> None:
    reducing(name)


def around_flat_forward(
    module: nn.Module, wrap: Callable[[Callable[[], list[str]], Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the function that runs before each gathering by ``wrap(replaced, that function)``.

    ``replaced()`` returns the FQNs of parameters for which modules have other tensors than torch put there.
    """
    for start, unit in _units(module):
        handle: Any = unit._handle
        handle.pre_unshard = wrap(functools.partial(_replaced_in, start, handle), handle.pre_unshard)


def _replaced_in(start: str, handle: Any) -> list[str]:
    flat = handle.flat_param
    if not handle.is_sharded(flat) and handle.uses_sharded_strategy:
        return []  # views of the gathered flat parameter are registered
    if not handle._use_orig_params:
        registered = handle._fully_sharded_module._parameters.get("_flat_param")
        return [] if registered is flat else [f"{start}_flat_param"]
    infos = zip(flat._param_infos, flat._params, flat._fqns, strict=True)
    return [start + fqn for info, param, fqn in infos if info.module._parameters.get(info.param_name) is not param]


def flat_pieces(module: nn.Module) -> dict[str, FlatPiece]:
    """Return this rank's pieces by FQN, under tied names too. Not collective. Nothing may be gathered."""
    pieces: dict[str, FlatPiece] = {}
    for start, unit in _units(module, repeat=True):
        flat: Any = unit._handle.flat_param  # type: ignore[union-attr]
        shard = getattr(flat, "_local_shard", flat).detach()
        for index, (fqn, where) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
            first, count = (where.offset_in_shard, where.numel_in_shard) if where.in_shard else (0, 0)
            pieces[start + fqn] = FlatPiece(
                shard[first : first + count],
                where.intra_param_start_idx if where.in_shard else 0,
                flat._shapes[index],
            )
        for name, _, owner, first_name, _, first_owner in flat._shared_param_infos:
            alias, known = (
                start + clean_fqn(".".join(part for part in pair if part))
                for pair in ((owner, name), (first_owner, first_name))
            )
            pieces[alias] = pieces[known]
    return pieces


def flat_param_names(module: nn.Module) -> Iterator[tuple[Any, str, list[tuple[str, torch.Size] | None]]]:
    """Yield each flat parameter, its own name, and the FQNs and shapes of the pieces that a forward splits it into.

    A piece that is padding is None. With ``use_orig_params=False`` the own name is the registered parameter's;
    otherwise it is empty.
    """
    for start, unit in _units(module):
        flat: Any = unit._handle.flat_param  # type: ignore[union-attr]
        named = ((f"{start}{name}", shape) for name, shape in zip(flat._fqns, flat._shapes, strict=True))
        padding = flat._is_padding_mask if unit._use_orig_params else [False] * len(flat._fqns)
        pieces = [None if is_padding else next(named) for is_padding in padding]
        yield flat, "" if unit._use_orig_params else f"{start}_flat_param", pieces


def _units(module: nn.Module, *, repeat: bool = False) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    """Yield the units that hold a flat parameter, with the clean prefix of their parameters' names.

    Args:
        module: The sharded root.
        repeat: Yield a unit under each of its names.
    """
    for prefix, unit in module.named_modules(remove_duplicate=not repeat):
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield clean_fqn(f"{prefix}.") if prefix else "", unit
