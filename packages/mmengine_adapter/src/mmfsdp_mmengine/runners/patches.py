"""Replaces functions of MMEngine that no registry and no argument can change.

- ``Runner.setup_env`` starts NCCL and needs a GPU; ``Runner.wrap_model`` applies the wrapper of a plain runner, and
  uses MMEngine's own DistributedDataParallel if the config names none. Users' scripts call ``Runner.from_cfg`` of the
  class that they imported before the config was read, so a class of ours would not be used.
- ``find_latest_checkpoint`` returns what ``last_checkpoint`` names, even if it is gone or damaged; ``load_or_resume``
  does not go on to an older one if that turns out while it is loaded.
- No hook is told that an error has ended ``train``, so `CheckpointHook` could not give back its signals.
- The loops of validation and test wait until the timeout where ranks have different numbers of batches.
- ``FlexibleRunner.from_cfg`` fails without ``env_cfg`` and does not pass ``compile`` on; the replaced
  ``FlexibleRunner.__init__``, which it calls, fixes both.
- ``Registry.build``, which all registries share, builds MMEngine's own class where a config has it as an object, and
  reports an unknown name without a hint. An optimizer, a ``collate_fn`` and a ``worker_init_fn`` are looked up
  elsewhere, where errors do not even contain the name.
- ``Config.pretty_text``, which is logged and saved, fails on functions and devices, which ``model_wrapper`` may have.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import getattr_static
from typing import Any

import mmengine.runner
import mmengine.runner._flexible_runner
import mmengine.runner.runner
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dist import is_distributed
from mmengine.model import is_model_wrapper
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import FUNCTIONS, MODEL_WRAPPERS, OPTIMIZERS, Registry
from mmengine.runner import EpochBasedTrainLoop, FlexibleRunner, IterBasedTrainLoop, Runner, TestLoop, ValLoop

from mmfsdp import FullyShardedDataParallel
from mmfsdp_mmengine.checkpoints.latest import find_latest_checkpoint, resume_newest
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.configs.agreement import check_runner
from mmfsdp_mmengine.configs.arguments import named
from mmfsdp_mmengine.configs.lookup import UnknownNameError, check_known, unknown_type
from mmfsdp_mmengine.hooks.checkpoint import CheckpointHook
from mmfsdp_mmengine.processes.distributed import start_process_group
from mmfsdp_mmengine.processes.leaving import leave_in_order
from mmfsdp_mmengine.registry import ours_for
from mmfsdp_mmengine.runners.runner import let_shard, with_patient_workers
from mmfsdp_mmengine.runners.uneven_batches import check_batches, check_coming_validation
from mmfsdp_mmengine.strategy import FSDPStrategy

__all__ = ["patch_mmengine"]


def patch_mmengine() -> None:
    """Replace the functions that the module docstring lists; a second call changes nothing."""
    _replace(Runner, "setup_env", _setup_env)
    _replace(Runner, "wrap_model", _wrap_model)
    for module in (mmengine.runner, mmengine.runner.runner, mmengine.runner._flexible_runner):
        module.find_latest_checkpoint = find_latest_checkpoint
    _replace(FlexibleRunner, "__init__", _init)
    _replace(Registry, "build", _build)
    _replace(DefaultOptimWrapperConstructor, "__call__", _construct)
    for runner in (Runner, FlexibleRunner):
        _replace(runner, "build_dataloader", _build_dataloader)
        _replace(runner, "load_or_resume", _load_or_resume)
        _replace(runner, "train", _train)
    for loop in (EpochBasedTrainLoop, IterBasedTrainLoop):
        _replace(loop, "run", _run_training)
    for loop in (ValLoop, TestLoop):
        _replace(loop, "run", _run_checked)
    if _stock_pretty_text.fget is not None and Config.pretty_text is _stock_pretty_text:
        Config.pretty_text = property(_pretty_text, doc=_stock_pretty_text.__doc__)


_stock_pretty_text: property = Config.__dict__["pretty_text"]


_training: weakref.WeakSet[Runner | FlexibleRunner] = weakref.WeakSet()
"""The runners that train now."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    stock = getattr(owner, name)
    if getattr(stock, "__module__", "") == __name__:
        return
    ours = wraps(stock)(make(stock))
    ours.__module__ = __name__
    setattr(owner, name, staticmethod(ours) if isinstance(getattr_static(owner, name), staticmethod) else ours)


def _setup_env(stock: Callable[..., None]) -> Callable[..., None]:
    def setup_env(self: Runner, env_cfg: dict[str, Any]) -> None:
        if self.distributed and not is_distributed() and not torch.cuda.is_available():
            start_process_group(self.launcher, **env_cfg.get("dist_cfg", {}))
        stock(self, env_cfg)

    return setup_env


def _wrap_model(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def wrap_model(self: Runner, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        _warn_of_ignored(self)
        name = ours_for((model_wrapper_cfg or {}).get("type"))
        if self.distributed:
            check_known(model_wrapper_cfg, MODEL_WRAPPERS, "model_wrapper_cfg")
        if self.distributed and name is not None and not is_model_wrapper(model):
            cls = MODEL_WRAPPERS.get(name) if isinstance(name, str) else name
            if isinstance(cls, type) and issubclass(cls, FullyShardedDataParallel):
                leave_in_order()  # on a GPU MMEngine started the process group
                check_runner(self)
                let_shard(self, model_wrapper_cfg)
                return model  # sharded after the optimizer is built from it
        if self.distributed and model_wrapper_cfg is None:  # the wrapper that MMEngine uses then, from the registry
            unused = self.cfg.get("find_unused_parameters", False)
            model_wrapper_cfg = {"broadcast_buffers": False, "find_unused_parameters": unused}
        return stock(self, model_wrapper_cfg, model)

    return wrap_model


def _init(stock: Callable[..., None]) -> Callable[..., None]:
    def init(self: FlexibleRunner, *args: Any, **kwargs: Any) -> None:
        kwargs["env_cfg"] = kwargs.get("env_cfg") or {"dist_cfg": {"backend": "nccl"}}
        if kwargs.get("cfg") is not None:
            kwargs.setdefault("compile", kwargs["cfg"].get("compile", False))
        stock(self, *args, **kwargs)
        _warn_of_ignored(self)
        if isinstance(self.strategy, CheckpointingStrategy):
            check_runner(self)
            self.build_dataloader = with_patient_workers(self.build_dataloader)
            if isinstance(self.strategy, FSDPStrategy) and self._train_dataloader is not None:
                self._train_dataloader = self.strategy.divide_loader(self._train_dataloader)
        elif (ours := ours_for(type(self.strategy))) is not type(self.strategy):
            self.logger.warning(
                f"strategy is an object of MMEngine's own {ours.__name__}, which mmfsdp does not change. Write "
                f"strategy=dict(type='{ours.__name__}', ...), or build the object from {ours.__module__}."
            )

    return init


def _build(stock: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Registry, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        cfg = _with_ours(cfg)
        try:
            return stock(self, cfg, *args, **kwargs)
        except UnknownNameError:  # of an object that is built on the way
            raise
        except KeyError as error:
            unknown = unknown_type(self, cfg, kwargs.get("default_args"))
            if unknown is None:
                raise
            raise unknown from error

    return build


def _with_ours(cfg: Any) -> Any:
    """Return a config with our class in place of the MMEngine class that it has as an object. Not changed."""
    given = cfg.get("type") if hasattr(cfg, "get") else None
    if ours_for(given) is given:
        return cfg
    changed = copy.copy(cfg)
    changed["type"] = ours_for(given)
    return changed


def _construct(stock: Callable[..., Any]) -> Callable[..., Any]:
    def construct(self: DefaultOptimWrapperConstructor, model: nn.Module) -> Any:
        with OPTIMIZERS.switch_scope_and_registry(None) as registry:
            check_known(self.optimizer_cfg, registry, "optim_wrapper.optimizer")
        return stock(self, model)

    return construct


def _build_dataloader(stock: Callable[..., Any]) -> Callable[..., Any]:
    def build_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        for setting in ("collate_fn", "worker_init_fn"):
            if isinstance(dataloader, dict):
                check_known(dataloader.get(setting), FUNCTIONS, f"dataloader.{setting}")
        return stock(dataloader, *args, **kwargs)

    return build_dataloader


def _load_or_resume(stock: Callable[..., None]) -> Callable[..., None]:
    def load_or_resume(self: Runner | FlexibleRunner) -> None:
        automatic = self._resume and not isinstance(self._resume, str) and self._load_from is None
        shards = isinstance(getattr(self, "strategy", None), CheckpointingStrategy)
        if self._has_loaded or not automatic or not shards:
            stock(self)
            return
        hooks = [hook for hook in self.hooks if isinstance(hook, CheckpointHook)]
        nodes = (hook.open_nodes(self) for hook in hooks if self in _training)
        find_newer = (saves.newest for saves in nodes if saves is not None)
        found = resume_newest(self.work_dir, self.resume, [hook.directory(self) for hook in hooks], find_newer)
        self.logger.info(f"Auto resumed from the latest checkpoint {found}.")
        self._has_loaded = found is not None

    return load_or_resume


def _train(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def train(self: Runner | FlexibleRunner) -> nn.Module:
        _training.add(self)
        try:
            return stock(self)
        finally:
            _training.discard(self)
            for hook in self.hooks:
                if isinstance(hook, CheckpointHook):
                    hook.release()

    return train


def _run_training(stock: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any) -> Any:
        check_coming_validation(self.runner)
        return stock(self)

    return run


def _run_checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any) -> Any:
        check_batches(self)
        return stock(self)

    return run


def _pretty_text(self: Config) -> str:
    stock = _stock_pretty_text.fget
    assert stock is not None
    try:
        return str(stock(self))
    except SyntaxError:
        return str(stock(Config(named(self.to_dict()))))


def _warn_of_ignored(runner: Runner | FlexibleRunner) -> None:
    """Log what of a runner's config is ignored, though it names a strategy or wrapper that shards. Not collective.

    Args:
        runner: A runner whose logger is built.
    """
    for warning in _warnings(runner, runner.cfg or {}):
        runner.logger.warning(warning)


def _warnings(runner: Runner | FlexibleRunner, config: Any) -> Iterator[str]:
    if isinstance(runner, FlexibleRunner):
        if _names(config.get("model_wrapper_cfg"), "MMFullyShardedDataParallel") and not _shards(config):
            yield (
                "FlexibleRunner ignores model_wrapper_cfg, so the model is not sharded. Write "
                "strategy=dict(type='FSDPStrategy', model_wrapper=dict(...)), or use the plain Runner."
            )
        return
    wrapped = _names(config.get("model_wrapper_cfg"), "MMFullyShardedDataParallel")
    if _shards(config) and not wrapped:
        yield (
            "The plain Runner ignores strategy, so the model is not sharded. Write runner_type='FlexibleRunner', and "
            "start a script that reads it, as OpenMMLab's tools/train.py does; or write model_wrapper_cfg="
            "dict(type='MMFullyShardedDataParallel', ...) instead of strategy."
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if wrapped and not runner.distributed and ranks != "1":
        yield (
            f"launcher is 'none', so each of the {ranks} processes trains the whole model by itself and writes the "
            "same files. Write launcher='pytorch', or start OpenMMLab's tools/train.py with --launcher pytorch."
        )


def _shards(config: Any) -> bool:
    return _names(config.get("strategy"), "FSDPStrategy")


def _names(setting: Any, name: str) -> bool:
    """Whether the setting's type is a class of ours, or its name in any scope."""
    kind = ours_for(setting.get("type")) if hasattr(setting, "get") else None
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2] == name
