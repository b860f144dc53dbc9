"""Applies activation checkpointing to the modules that a plan lists, without renaming parameters.

A listed module gets an instance attribute ``forward``. No module is wrapped, so names, state-dict keys and classes stay
as they are, and hooks of the module, such as ``fully_shard``'s, run outside of the recomputed region.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mmfsdp.errors import ConfigError, PlanError, PlanMismatchError, ShardStateError, closest
from mmfsdp.planning.compiled import unwrap_compiled
from mmfsdp.sharding.activation.keeping import (
    offloading_contexts,
    pins_memory,
    selective_contexts,
    traced_contexts,
)
from mmfsdp.sharding.activation.kept_operators import DEFAULT_SAVE_OPS, check_operator

if TYPE_CHECKING:
    from mmfsdp.planning.plan_records import ActivationPlan

__all__ = ["apply_activation_checkpointing"]


def apply_activation_checkpointing(model: nn.Module, plan: ActivationPlan) -> None:
    """Make the modules in ``plan.fqns`` recompute their forward in backward. Not collective.

    Call it before sharding and before ``torch.compile``. Everything is checked before the first module is changed. A
    module in eval mode, or called without gradients, runs its forward as if nothing had been applied. Listing a module
    and its descendant nests the regions: the inner forward then runs three times, for a lower peak. A module that the
    model holds under several names is one region, even if several of them are listed.

    Args:
        model: The model, changed in place.
        plan: Which modules, and how: ``fqns``, ``mode``, ``save_ops``, ``offload``, ``preserve_rng_state``,
            ``use_reentrant``, ``early_stop``, ``determinism_check``.

    Raises:
        ConfigError: A setting or operator name is unknown, or two settings exclude each other.
        PlanMismatchError: The model has no module of a listed name.
        PlanError: A module has activation checkpointing already, is listed twice, or has no forward of its own.
    """
    _check_settings(plan)
    regions = _find_regions(model, plan)
    for fqn, module in regions.items():
        setattr(module, "forward", _CheckpointedForward(fqn, module, plan))  # noqa: B010 - mypy: a method is assigned


class _CheckpointedForward:
    """The replacement of ``module.forward``; survives deepcopy and pickling together with its module."""

    def __init__(self, fqn: str, module: nn.Module, plan: ActivationPlan) -> None:
        self.fqn = fqn
        # Weak: a cycle would keep the module's memory until the next garbage collection.
        self.module = weakref.ref(module)
        self.replaced = module.__dict__.get("forward")  # an instance attribute set by other code, which keeps working
        self.save_ops = (plan.save_ops or DEFAULT_SAVE_OPS) if plan.mode == "ops" else ()
        self.offload = plan.offload
        self.use_reentrant = plan.use_reentrant
        self.options: dict[str, Any] = {"preserve_rng_state": plan.preserve_rng_state}
        if not plan.use_reentrant:
            self.options |= {"determinism_check": plan.determinism_check, "early_stop": plan.early_stop}

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # inspect.signature(module.forward) looks here
        module = self.module()
        assert module is not None, "the module owns this object"
        return self.replaced or functools.partial(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, forward = self.module(), self.__wrapped__
        assert module is not None, "the module owns this object"
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(forward, args, kwargs)
        if self.use_reentrant:
            return self._reentrant(module, forward, args, kwargs)

        # Keyword arguments become positional ones, because torch looks only among those for devices whose random
        # state it must restore, and passes only those to save_on_cpu. The region must not keep a reference to
        # ``args``, which would then stay on the device.
        num_args, names = len(args), tuple(kwargs)
        values: list[Any] = [*args, *kwargs.values()]
        spec: Any = None
        if self.offload:
            values, spec = tree_flatten((args, kwargs))
        region = _Region(self.fqn, module, forward, lambda flat: _unpack(flat, num_args, names, spec))
        with save_on_cpu(pin_memory=pins_memory()) if self.offload else contextlib.nullcontext():
            contexts = offloading_contexts if self.offload else selective_contexts
            return checkpoint(region, *values, use_reentrant=False, **self._context(contexts), **self.options)

    def _traced(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # The compiler recomputes within its graph, where buffers are written once and random state is handled.
        if self.offload or self.use_reentrant:
            _refuse_compiler(self.fqn, self.offload)
        return checkpoint(forward, *args, use_reentrant=False, **self._context(traced_contexts), **kwargs)

    def _reentrant(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # This variant differentiates only tensors that are themselves arguments and results, so flatten structures.
        values, spec = tree_flatten((args, kwargs))
        structure: Any = None

        def run(_: torch.Tensor, *values: Any) -> tuple[Any, ...]:
            nonlocal structure
            results, structure = tree_flatten(region(*values))
            return tuple(results)

        region = _Region(self.fqn, module, forward, lambda flat: _unpack(flat, 0, (), spec))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not any(tensor.requires_grad for tensor in (*tensors, *module.parameters())):
            return forward(*args, **kwargs)
        # Without an input that requires gradients, this variant would compute none for the parameters.
        anchor = torch.empty(0, requires_grad=True)
        results = checkpoint(run, anchor, *values, use_reentrant=True, **self.options)
        return tree_unflatten(results, structure)

    def _context(self, contexts: Callable[..., Any]) -> dict[str, Any]:
        return {"context_fn": functools.partial(contexts, self.save_ops)} if self.save_ops else {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "module": self.module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, module=weakref.ref(state["module"]))


def _refuse(fqn: str, offload: bool) -> NoReturn:
    what, way_out = "Activation offload", "Remove one of them."
    if not offload:
        what, way_out = "use_reentrant=True", "Set it to False."
    raise ConfigError(f"{what} does not work under torch.compile. {way_out}", fqn=fqn)


# Not traced: an exception while tracing can make the compiler fall back to eager mode instead of being raised.
_refuse_compiler = torch.compiler.disable(_refuse)


class _Region:
    """One run of a region: the first call is the forward, every later one a recomputation."""

    def __init__(
        self, fqn: str, module: nn.Module, forward: Callable[..., Any], unpack: Callable[[Any], tuple[Any, Any]]
    ) -> None:
        self.fqn, self.module, self.forward, self.unpack = fqn, module, forward, unpack
        self.parameters: dict[str, torch.Tensor] | None = None
        # Norm layers update their running statistics in forward; the recomputation updates copies. Copied here, since
        # an operator that only the recomputation runs would confuse mode 'ops'.
        self.scratch = [(layer, name, buffer.clone()) for layer, name, buffer in _running_statistics(module)]

    def __call__(self, *values: Any) -> Any:
        args, kwargs = self.unpack(values)
        if self.parameters is None:
            self.parameters = dict(self.module.named_parameters())
            return self.forward(*args, **kwargs)
        self._check_parameters(self.parameters)
        with _swapped(self.scratch):
            return self.forward(*args, **kwargs)

    def _check_parameters(self, before: Mapping[str, torch.Tensor]) -> None:
        for name, now in self.module.named_parameters():
            then = before.get(name, now)
            # Sharding replaces parameters as well, but by DTensors or by views of a flat parameter.
            sharded = isinstance(then, DTensor) or isinstance(now, DTensor) or then._is_view() or now._is_view()
            if then is not now and not sharded:
                raise ShardStateError(
                    f"Parameter {name!r} of a checkpointed module was replaced between forward and backward (as "
                    "torch.func.functional_call does): its recomputation would be wrong. Run backward while the "
                    "replacement is in place, or leave this module out of activation checkpointing.",
                    fqn=self.fqn,
                )


def _running_statistics(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [
        (layer, name, buffer)
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if name in names
    ]


@contextlib.contextmanager
def _swapped(scratch: list[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    real = [(layer, name, getattr(layer, name)) for layer, name, _ in scratch]
    for layer, name, buffer in scratch:
        setattr(layer, name, buffer)
    try:
        yield
    finally:
        for layer, name, buffer in real:
            setattr(layer, name, buffer)


def _unpack(values: tuple[Any, ...], num_args: int, names: tuple[str, ...], spec: Any) -> tuple[Any, Any]:
    if spec is not None:
        args, kwargs = tree_unflatten(list(values), spec)
        return args, kwargs
    return values[:num_args], dict(zip(names, values[num_args:], strict=True))


def _check_settings(plan: ActivationPlan) -> None:
    for name, accepted in (("mode", ("full", "ops")), ("determinism_check", ("default", "none"))):
        value = getattr(plan, name)
        if value not in accepted:
            hint = closest(value, accepted) or f" Accepted: {', '.join(map(repr, accepted))}."
            raise ConfigError(f"{name}={value!r} is not known.{hint}", config=f"activation_checkpointing.{name}")
    if plan.save_ops and plan.mode != "ops":
        raise ConfigError(f"save_ops is only used with mode='ops', but mode is {plan.mode!r}.")
    if plan.use_reentrant and (plan.mode == "ops" or plan.offload):
        wish = "mode='ops'" if plan.mode == "ops" else "offload=True"
        raise ConfigError(f"use_reentrant=True cannot be combined with {wish}. Set use_reentrant=False.")
    for name in plan.save_ops:
        check_operator(name)


def _find_regions(model: nn.Module, plan: ActivationPlan) -> dict[str, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    regions: dict[str, nn.Module] = {}
    for fqn in plan.fqns:
        if fqn not in modules:
            raise PlanMismatchError(f"The model has no module {fqn!r}.{closest(fqn, modules)}", fqn=fqn)
        # Within a graph the compiler recomputes.
        module = unwrap_compiled(modules[fqn])
        if fqn in regions:
            raise PlanError("A module is listed twice for activation checkpointing.", fqn=fqn)
        if isinstance(module.__dict__.get("forward"), _CheckpointedForward):
            raise PlanError("Activation checkpointing is already applied to this module.", fqn=fqn)
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise PlanError(
                f"A {type(module).__name__} has no forward to recompute. List the modules in it instead.", fqn=fqn
            )
        if not any(module is listed for listed in regions.values()):  # else: one module under a second name
            regions[fqn] = module
    return regions
