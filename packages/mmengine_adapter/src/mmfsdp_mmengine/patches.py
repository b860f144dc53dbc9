"""The functions of MMEngine itself that are replaced, because no registry and no argument leads to them.

- ``Runner.setup_env`` starts NCCL and needs a GPU; ``Runner.wrap_model`` is where a plain runner meets the wrapper.
  Users' scripts call ``Runner.from_cfg`` of the class that they imported before the config was read.
- ``find_latest_checkpoint`` believes ``last_checkpoint``, whatever became of what it names.
- ``FlexibleRunner.from_cfg`` fails without ``env_cfg`` and does not pass ``compile`` on; ``FlexibleRunner.__init__``,
  which it calls, makes up for it.
- ``Config.pretty_text``, which is logged and saved, fails on functions and devices, as ``model_wrapper`` may hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mmengine.runner
import mmengine.runner._flexible_runner
import mmengine.runner.runner
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dist import is_distributed
from mmengine.model import is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import FlexibleRunner, Runner

from mmfsdp import FullyShardedDataParallel
from mmfsdp_mmengine.config import named
from mmfsdp_mmengine.distributed import leave_in_order, start_process_group
from mmfsdp_mmengine.latest import find_latest_checkpoint
from mmfsdp_mmengine.runner import let_shard

__all__ = ["patch_mmengine"]


def patch_mmengine() -> None:
    """Replace what this module says; doing so twice changes nothing."""
    _replace(Runner, "setup_env", _setup_env)
    _replace(Runner, "wrap_model", _wrap_model)
    for module in (mmengine.runner, mmengine.runner.runner, mmengine.runner._flexible_runner):
        module.find_latest_checkpoint = find_latest_checkpoint
    _replace(FlexibleRunner, "__init__", _init)
    if _stock_pretty_text.fget is not None and Config.pretty_text is _stock_pretty_text:
        Config.pretty_text = property(_pretty_text, doc=_stock_pretty_text.__doc__)


_stock_pretty_text: property = Config.__dict__["pretty_text"]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    stock = getattr(owner, name)
    if getattr(stock, "__module__", "") == __name__:
        return
    ours = wraps(stock)(make(stock))
    ours.__module__ = __name__
    setattr(owner, name, ours)


def _setup_env(stock: Callable[..., None]) -> Callable[..., None]:
    def setup_env(self: Runner, env_cfg: dict[str, Any]) -> None:
        if self.distributed and not is_distributed() and not torch.cuda.is_available():
            start_process_group(self.launcher, **env_cfg.get("dist_cfg", {}))
        stock(self, env_cfg)

    return setup_env


def _wrap_model(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def wrap_model(self: Runner, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        name = (model_wrapper_cfg or {}).get("type")
        if self.distributed and name is not None and not is_model_wrapper(model):
            cls = MODEL_WRAPPERS.get(name) if isinstance(name, str) else name
            if isinstance(cls, type) and issubclass(cls, FullyShardedDataParallel):
                leave_in_order()  # the process group is MMEngine's own on a GPU
                let_shard(self, model_wrapper_cfg)
                return model  # sharded once the optimizer was built from it
        return stock(self, model_wrapper_cfg, model)

    return wrap_model


def _init(stock: Callable[..., None]) -> Callable[..., None]:
    def init(self: FlexibleRunner, *args: Any, **kwargs: Any) -> None:
        kwargs["env_cfg"] = kwargs.get("env_cfg") or {"dist_cfg": {"backend": "nccl"}}
        if kwargs.get("cfg") is not None:
            kwargs.setdefault("compile", kwargs["cfg"].get("compile", False))
        stock(self, *args, **kwargs)

    return init


def _pretty_text(self: Config) -> str:
    stock = _stock_pretty_text.fget
    assert stock is not None
    try:
        return str(stock(self))
    except SyntaxError:
        return str(stock(Config(named(self.to_dict()))))
