"""`FullyShardedDataParallel`: a wrapper with the arguments and methods of torch's class of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn
from mmfsdp.errors import UnsupportedCallError
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.fsdp1.flat_params import flat_params
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.training import clip_grad_norm_, no_sync
from mmfsdp.sharding.apply import shard
from mmfsdp.state.model import load_model_state_dict, model_state_dict
from mmfsdp.state.report import LoadReport
from mmfsdp.torch_style import optimizer_states, sharded_modules, state_dict_types, summoning
from mmfsdp.torch_style.arguments import translate_arguments
from mmfsdp.torch_style.state_dict_types import default_state_dict_type, on_cpu
from mmfsdp.torch_style.static_methods import instance_or_static

__all__ = ["FullyShardedDataParallel"]

_flat_classes: dict[type, type] = {}


class FullyShardedDataParallel(nn.Module):
    """Shards a module and wraps it: it takes the arguments of torch's class, old names included, and uses FSDP2.

    Collective: every rank, with equal modules and arguments. Parameters and keys of state dicts have the module's own
    names, without a prefix. With ``engine='fsdp1'`` this object and every shard unit are instances of torch's own
    FullyShardedDataParallel.

    Args:
        module: The module to shard, on any device; on ``meta`` it needs no memory for a whole copy.
        process_group: This and all other arguments: see `mmfsdp.torch_style.translate_arguments`.
        **kwargs: Arguments of torch's class under their names in any version, and ``engine``, ``config`` and
            ``activation_checkpointing``.

    Raises:
        MmfsdpError: See `shard`.
    """

    def __init__(self, module: nn.Module, process_group: Any = None, **kwargs: Any) -> None:
        means = translate_arguments(process_group=process_group, **kwargs)
        roots: list[nn.Module] = []

        def become_torch_fsdp(root: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
            # The root wrapper is this object itself, so that isinstance() is true for the object that the user holds.
            self.__class__ = _with_torch_fsdp(type(self))
            torch_fsdp.FullyShardedDataParallel.__init__(self, root, **arguments)  # type: ignore[arg-type]
            roots.append(self)
            return self

        sharded = shard(
            module,
            means.config,
            means.mesh,
            policy=means.policy,
            check_fn=means.check_fn,
            param_init_fn=means.param_init_fn,
            ignored_modules=means.ignored_modules,
            ignored_params=means.ignored_params,
            wrap_root=become_torch_fsdp,
        )
        if not roots:
            super().__init__()
            self.module = sharded
            find_sharded_model(sharded).alias(self)
            default_state_dict_type(self)
            _load_from_outside(self)

    @property
    def plan(self) -> ShardPlan:
        """The plan that was applied."""
        return find_sharded_model(self).plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self._is_torch_fsdp:
            return super().forward(*args, **kwargs)
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """See `mmfsdp.no_sync`."""
        return no_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `mmfsdp.clip_grad_norm_`. Collective: every rank."""
        return clip_grad_norm_(self, max_norm, norm_type)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` for every module, children first, with whole parameters; keep changes. Collective: every rank."""
        if self._is_torch_fsdp:
            return super().apply(fn)
        with summoning.summon_full_params(self):
            return super().apply(fn)

    def check_is_root(self) -> bool:
        """Return True: the wrapper is always a root."""
        return not self._is_torch_fsdp or super().check_is_root()  # type: ignore[misc]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce gradients in place of the default. Needs engine ``fsdp1``. Not collective.

        Args:
            state: Passed to ``hook``.
            hook: See torch's class.

        Raises:
            UnsupportedCallError: The engine is not ``fsdp1``, or the strategy is hybrid.
        """
        mesh = self.plan.mesh
        hybrid = "HYBRID" in self.plan.strategy or (mesh.replicate > 1 and mesh.shard > 1)
        if not self._is_torch_fsdp or hybrid:
            raise UnsupportedCallError(
                f"Communication hooks need engine='fsdp1' and no hybrid strategy; the engine is {self.plan.engine!r} "
                f"and the strategy {self.plan.strategy!r} on {mesh}. To reduce gradients in 16 bits, no hook is "
                "needed: pass mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)."
            )
        super().register_comm_hook(state, hook)  # type: ignore[misc]

    fsdp_modules = instance_or_static(sharded_modules.fsdp_modules)
    summon_full_params = instance_or_static(summoning.summon_full_params)
    get_state_dict_type = instance_or_static(state_dict_types.get_state_dict_type)
    set_state_dict_type = instance_or_static(state_dict_types.set_state_dict_type)
    state_dict_type = instance_or_static(state_dict_types.state_dict_type)
    optim_state_dict = instance_or_static(optimizer_states.optim_state_dict)
    optim_state_dict_to_load = instance_or_static(optimizer_states.optim_state_dict_to_load)
    full_optim_state_dict = instance_or_static(optimizer_states.full_optim_state_dict)
    sharded_optim_state_dict = instance_or_static(optimizer_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = instance_or_static(optimizer_states.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = instance_or_static(optimizer_states.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = instance_or_static(optimizer_states.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = instance_or_static(optimizer_states.rekey_optim_state_dict)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters, sharded, under the module's own names; none with ``recurse=False``."""
        if recurse and not self._is_torch_fsdp:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)
            return
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield (clean_fqn(name) if recurse else name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names; none with ``recurse=False``."""
        if recurse and not self._is_torch_fsdp:
            yield from self.module.named_buffers(prefix, recurse, remove_duplicate)
            return
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield (clean_fqn(name) if recurse else name), buffer

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the module's state dict under its own keys, in the model's state dict type. Collective: every rank.

        By default tensors are whole, on every rank. `set_state_dict_type` changes that.

        Args:
            destination: Receives the values, and is returned. Default: a new dict.
            prefix: Put before each key.
            keep_vars: Do not detach DTensors; whole tensors are always detached.
        """
        settings = self.get_state_dict_type()
        config = settings.state_dict_config
        values: dict[str, Any]
        state = find_sharded_model(self)
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            rank0_only = getattr(config, "rank0_only", False)
            if not all(state.shown.values()):
                values = {}  # summon_full_params shows parameters on the first rank only
            elif state.shown and self._is_torch_fsdp:
                shown = super().state_dict()
                values = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in shown.items()
                }
            else:
                values = model_state_dict(self, rank0_only=rank0_only, cpu_offload=config.offload_to_cpu)
        elif self._is_torch_fsdp:
            values = super().state_dict(keep_vars=keep_vars)
        else:
            state.reshard()
            values = self.module.state_dict(keep_vars=keep_vars)
            if config.offload_to_cpu:
                values = on_cpu(values)
        destination = {} if destination is None else destination
        destination.update({prefix + key: value for key, value in values.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadReport:
        """See `mmfsdp.load_model_state_dict`. Collective: every rank.

        Args:
            state_dict: Whole tensors or this model's own shards.
            strict: Raise if keys do not match.
            assign: Accepted for compatibility with torch; values are always copied.
        """
        if self._is_torch_fsdp and self._torch_loads(state_dict):
            report = super().load_state_dict(state_dict, strict)
            return LoadReport(tuple(report.missing_keys), tuple(report.unexpected_keys))
        return load_model_state_dict(self, state_dict, strict=strict)

    def _torch_loads(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether engine ``fsdp1`` loads a state dict with torch's own method, on which our loading is built."""
        if any(isinstance(value, DTensor) for value in state_dict.values()):
            return self.get_state_dict_type().state_dict_type is StateDictType.SHARDED_STATE_DICT
        return not flat_params(self)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules or name == "module":
                raise
            return getattr(modules["module"], name)

    def __getitem__(self, key: Any) -> Any:
        """Return an item of a module that is a container."""
        return self.module[key]  # type: ignore[index]

    @property
    def _is_torch_fsdp(self) -> bool:
        return isinstance(self, torch_fsdp.FullyShardedDataParallel)


def _with_torch_fsdp(cls: type) -> type:
    """Return the wrapper class with torch's FullyShardedDataParallel as a further base."""
    if cls not in _flat_classes:
        _flat_classes[cls] = type(cls.__name__, (cls, torch_fsdp.FullyShardedDataParallel), {"__doc__": cls.__doc__})
    return _flat_classes[cls]


def _load_from_outside(wrapper: nn.Module) -> None:
    """Make the state dicts of modules around a wrapper loadable. Not collective; such a load is collective.

    torch loads module by module, and copies each value into its parameter. It looks for the wrapped module's values
    under ``module.``, and cannot copy whole tensors into DTensors. Therefore the wrapper loads its values first, and
    hands torch the parameters' own.

    Args:
        wrapper: A wrapper with the module under ``module``; not one of engine ``fsdp1``, which torch loads into.
    """
    wrapper.register_load_state_dict_pre_hook(_load)


def _load(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    own = {key.removeprefix(prefix): state_dict.pop(key) for key in [*state_dict] if key.startswith(prefix)}
    load_model_state_dict(wrapper, own, strict=False)
    loaded = find_sharded_model(wrapper).module.state_dict()
    for key, value in own.items():
        fits = key in loaded and isinstance(value, torch.Tensor) and value.shape == loaded[key].shape
        state_dict[f"{prefix}module.{key}"] = loaded[key] if fits else value  # torch reports what does not fit
