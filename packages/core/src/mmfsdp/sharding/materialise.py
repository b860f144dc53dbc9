"""Initialises a model on the meta device, one shard unit at a time, with the values of the unsharded model.

An unsharded model is initialised module by module, children before parents (`nn.Module.apply`), and a parent may change
the values of its children: GPT-2 scales ``c_proj`` when it initialises the module above. So every module is initialised
in turn, even if it owns no parameters. If that would change parameters that another unit has sharded already, an error
says so, because their values would depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmfsdp.errors import PlanError

__all__ = ["InitFn", "Materialiser", "own_tensors"]

InitFn = Callable[[nn.Module], Any]
_INIT_METHODS = ("reset_parameters", "_reset_parameters")
_MODEL_METHODS = ("_init_weights", "init_weights")


class Materialiser:
    """Gives values to the tensors of a model that are on the meta device.

    Args:
        model: The model.
        device: The device of the values.
        seed: Seed of the random numbers. Each module's own seed is derived from it and the module's name, so the
            weights depend neither on the number of ranks nor on the units.
        held_whole: ``id`` of the parameters that no unit shards.
        init_fn: Initialises one module; default: its ``reset_parameters``, or ``_reset_parameters`` as torch's
            attention has.
        received: Whether another rank will send the values of each unit, so this rank need only allocate them.

    Raises:
        PlanError: The model initialises its weights in a method of its own, and ``init_fn`` is not given.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        seed: int,
        held_whole: set[int],
        init_fn: InitFn | None,
        *,
        received: bool = False,
    ) -> None:
        self._device, self._seed, self._held_whole, self._init_fn = device, seed, held_whole, init_fn
        self._only_allocates = received and init_fn is None
        self._pending = _with_meta_below(model)
        # The replacement of each tensor, which keeps ties. The original is kept too: otherwise another tensor could
        # get its id.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if self._pending and init_fn is None and not received:
            _refuse_own_method(model, self._pending)

    def make(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Initialise the tensors of one unit that are on the meta device.

        Args:
            modules: FQN and module, children before parents.

        Raises:
            PlanError: A tensor is left without a value, or one outside of the unit would change.
        """
        fresh: list[tuple[str, nn.Module, str, torch.Tensor]] = []
        mine: set[int] = set()
        written: set[int] = set()
        for fqn, module in modules:
            if id(module) not in self._pending:
                continue
            made = self._allocate(module)
            if self._only_allocates:
                continue
            fresh += [(fqn, module, name, getattr(module, name)) for name, is_fresh in made.items() if is_fresh]
            mine |= {_storage_address(tensor) for _, tensor in own_tensors(module)}
            self._initialise(fqn, module, list(made), mine, written)
        for fqn, module, name, allocated in fresh:
            value = getattr(module, name)
            is_untouched = value is allocated and _is_untouched(value, written)
            if value.is_meta or is_untouched or (_has_nan(value) and bool(torch.isnan(value).any())):
                buffers = (
                    " Or build the model under mmfsdp.parameters_on_meta(), which leaves buffers as their "
                    "constructors made them."
                )
                raise PlanError(
                    f"Initialising {type(module).__name__} left {f'{fqn}.{name}'.lstrip('.')!r} without a value. "
                    "Its reset_parameters() (or param_init_fn) must set every parameter and buffer of the module."
                    + ("" if isinstance(value, nn.Parameter) else buffers),
                    fqn=fqn,
                )

    def release_sharded(self) -> None:
        """Forget the parameters of the units that are initialised, except those that are held whole.

        torch frees a whole parameter only when the last reference to it goes. Buffers may be shared between units.
        """
        self._made = {
            key: pair
            for key, pair in self._made.items()
            if key in self._held_whole or not isinstance(pair[0], nn.Parameter)
        }

    def _allocate(self, module: nn.Module) -> dict[str, bool]:
        """Replace the module's own tensors on the meta device; return by name whether each is new, not tied."""
        made = {}
        for name, tensor in list(own_tensors(module)):
            if tensor.is_meta:
                made[name] = id(tensor) not in self._made
                if made[name]:
                    self._made[id(tensor)] = tensor, _allocated(tensor, self._device)
                setattr(module, name, self._made[id(tensor)][1])
        return made

    def _initialise(self, fqn: str, module: nn.Module, made: list[str], mine: set[int], written: set[int]) -> None:
        own_init = next((f for name in _INIT_METHODS if callable(f := getattr(module, name, None))), None)
        if self._init_fn is None and own_init is None:
            if made:
                names = ", ".join(repr(f"{fqn}.{name}".lstrip(".")) for name in made)
                raise PlanError(
                    f"{names} of {type(module).__name__} on the meta device cannot be initialised: the module has no "
                    "reset_parameters(). Give it one, or give param_init_fn.",
                    fqn=fqn,
                )
            return
        with (
            _without_wrappers(module),
            _GuardedWrites(fqn, module, mine, written) as guarding,
            _forked_random_state(self._device),
            torch.no_grad(),
        ):
            torch.manual_seed(_module_seed(self._seed, fqn))
            try:
                if self._init_fn is not None:
                    self._init_fn(module)
                elif own_init is not None:
                    own_init()
            except AttributeError as error:
                # A param_init_fn is often `lambda module: module.reset_parameters()`, which a container lacks.
                if made or error.obj is not module or error.name not in _INIT_METHODS:
                    raise
            guarding.check_in_place(module)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the parameters and buffers that a module itself owns."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _with_meta_below(model: nn.Module) -> set[int]:
    """Return the ``id`` of modules with a tensor on the meta device at or below them."""
    found: dict[int, bool] = {}

    def holds(module: nn.Module) -> bool:
        if id(module) not in found:
            found[id(module)] = False
            below = [holds(child) for child in module.children()]
            found[id(module)] = any(below) or any(tensor.is_meta for _, tensor in own_tensors(module))
        return found[id(module)]

    holds(model)
    return {key for key, has in found.items() if has}


def _refuse_own_method(model: nn.Module, pending: set[int]) -> None:
    """Raise if the model initialises weights in a method of its own: initialising its layers would differ."""
    for fqn, module in model.named_modules():
        if id(module) not in pending:
            continue
        for name in _MODEL_METHODS:
            if callable(getattr(module, name, None)):
                kind, at = type(module).__name__, f"model.{fqn}" if fqn else "model"
                give = f"param_init_fn={at}.{name}" if name == "_init_weights" else "a param_init_fn that does the same"
                raise PlanError(
                    f"{kind} is on the meta device and initialises its weights in {kind}.{name}; reset_parameters() of "
                    f"its layers would give them other values. Give {give} for one module, or build the model with "
                    "weights. If a checkpoint brings the values, a param_init_fn that zeroes a module's own tensors "
                    "will do.",
                    fqn=fqn or None,
                )


@contextmanager
def _without_wrappers(module: nn.Module) -> Iterator[None]:
    """Hide FSDP1's wrappers below a module, which gives modules their original names."""
    wrapped = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, FullyShardedDataParallel) and not isinstance(parent, FullyShardedDataParallel)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.module
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _is_untouched(tensor: torch.Tensor, written: set[int]) -> bool:
    """Return whether a tensor is still as allocated, for dtypes without NaN."""
    return not _has_nan(tensor) and tensor.numel() > 0 and _storage_address(tensor) not in written


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _allocated(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor full of NaN, which reveals values that initialisation leaves out."""
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    if _has_nan(empty):
        empty.fill_(float("nan"))
    else:
        empty.zero_()
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _module_seed(seed: int, fqn: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{fqn}".encode()).digest()[:7])


class _GuardedWrites(TorchDispatchMode):
    """Raises for writes to parameters below a module that belong to another unit.

    Version counters do not show such writes: ``param.data.normal_()``, which most libraries use, does not change them.

    Args:
        fqn: The module's name.
        module: The module that is initialised while the guard is active.
        mine: Addresses of the storages that the unit itself owns.
        written: Receives the address of every storage that is written.
    """

    def __init__(self, fqn: str, module: nn.Module, mine: set[int], written: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written
        self._fqn, self._kind = fqn, type(module).__name__
        self._others: dict[int, list[tuple[int, str]]] = {}  # by storage: where each parameter in it begins
        for name, param in module.named_parameters():
            if _storage_address(param) not in mine | {0}:
                self._others.setdefault(_storage_address(param), []).append((_begin(param), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check(args[index] if index < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _check(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if not isinstance(tensor, torch.Tensor):
                continue
            self._written.add(_storage_address(tensor))
            others = self._others.get(_storage_address(tensor))
            if others is not None or isinstance(tensor, DTensor):  # this rank may hold none of its elements
                named = [repr(name) for begin, name in sorted(others or ()) if begin <= _begin(tensor)]
                self._refuse(named[-1] if named else f"a parameter of shape {tuple(tensor.shape)}")

    def check_in_place(self, module: nn.Module) -> None:
        """Raise if such a parameter has got other storage, as ``to_empty()`` of a parent gives it."""
        now = {name: _storage_address(param) for name, param in module.named_parameters()}
        for address, others in self._others.items():
            for _, name in others:
                if now.get(name) != address:
                    self._refuse(repr(name))

    def _refuse(self, what: str) -> NoReturn:
        raise PlanError(
            f"Initialising {self._kind} changed {what}, which is sharded already: its values would depend on the "
            "number of ranks. Initialise it in the module that owns it, or wrap both in one unit. (A parameter that "
            "was not on the meta device is not changed either.)",
            fqn=self._fqn,
        )


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage, of the local tensor for a DTensor; 0 if it is empty."""
    local = _local(tensor)
    return 0 if local.is_meta or not local.numel() else local.untyped_storage().data_ptr()


def _begin(tensor: torch.Tensor) -> int:
    """Return the address of the first element."""
    return _local(tensor).data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
