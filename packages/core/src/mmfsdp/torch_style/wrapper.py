"""`FullyShardedDataParallel`: a wrapper with the arguments and methods of torch's class of the same name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

from mmfsdp.basics.text import clean_fqn
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.runtime.training import clip_grad_norm_, full_params, no_sync
from mmfsdp.sharding.apply import shard
from mmfsdp.state.model import load_model_state_dict
from mmfsdp.state.report import LoadReport
from mmfsdp.torch_style.arguments import translate_arguments

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

    @staticmethod
    def summon_full_params(module: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """See `mmfsdp.full_params`. Collective: every rank."""
        return full_params(module, writeback=writeback)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters, sharded, under the module's own names."""
        if not self._is_torch_fsdp:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)
            return
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield (clean_fqn(name) if recurse else name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names."""
        if not self._is_torch_fsdp:
            yield from self.module.named_buffers(prefix, recurse, remove_duplicate)
            return
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield (clean_fqn(name) if recurse else name), buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state dict under its own keys. Collective with engine ``fsdp1``: every rank.

        The values are DTensors. With ``fsdp1`` torch's state dict type decides, by default whole tensors. Use
        `mmfsdp.model_state_dict` for whole tensors with any engine.
        """
        if self._is_torch_fsdp:
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
            return state
        return dict(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadReport:
        """See `mmfsdp.load_model_state_dict`. Collective: every rank.

        Args:
            state_dict: Whole tensors or this model's own shards.
            strict: Raise if keys do not match.
            assign: Accepted for compatibility with torch; values are always copied.
        """
        if self._is_torch_fsdp:
            report = super().load_state_dict(state_dict, strict)
            return LoadReport(tuple(report.missing_keys), tuple(report.unexpected_keys))
        return load_model_state_dict(self, state_dict, strict=strict)

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
