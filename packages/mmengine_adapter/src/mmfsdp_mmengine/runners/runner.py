"""Runs MMEngine's plain `Runner` with a sharded model, through the `FSDPStrategy` of FlexibleRunner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn
from mmengine.logging import MMLogger
from mmengine.runner import BaseLoop, FlexibleRunner, Runner
from torch.utils.data import DataLoader

from mmfsdp import patient_workers
from mmfsdp.saving import random_state, restore_random_state
from mmfsdp_mmengine.configs.arguments import plain
from mmfsdp_mmengine.optimizers.binding import check_optimizer_named
from mmfsdp_mmengine.strategy import FSDPStrategy

__all__ = ["ShardingRunner", "let_shard", "with_patient_workers"]


class ShardingRunner(Runner):
    """The class of a `Runner` whose ``model_wrapper_cfg`` names a sharding wrapper.

    MMEngine wraps the model first, then builds the optimizer, initialises weights, and saves on the first rank. This
    class shards the model right before ``before_run``, when the optimizer and the schedulers have been built from the
    whole model. All ranks gather checkpoints, which are ``full`` unless the config's ``state_dict_cfg`` says
    otherwise.
    """

    strategy: FSDPStrategy
    model: nn.Module
    optim_wrapper: Any

    # These use only what both runners have, and leave the rest to the strategy.
    load_checkpoint = FlexibleRunner.load_checkpoint
    resume = FlexibleRunner.resume
    save_checkpoint = FlexibleRunner.save_checkpoint

    @property
    def _auto_scale_lr(self) -> Any:
        return self.auto_scale_lr

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a method of all hooks; before ``before_run``, shard the model."""
        if fn_name == "before_run":
            self._shard()
        super().call_hook(fn_name, **kwargs)

    def _init_model_weights(self) -> None:
        """Do nothing: the strategy initialised the weights before it sharded the model."""

    def _maybe_compile(self, target: str) -> None:
        """Compile the model as FlexibleRunner does."""
        self.strategy.compile_model(self.model, self.cfg.get("compile") or False)

    def _shard(self) -> None:
        strategy, trains = self.strategy, isinstance(self._train_loop, BaseLoop)
        if self.optim_wrapper is not None:
            # Training may follow a validation, and the optimizer constructor needs the whole model.
            check_optimizer_named(self.optim_wrapper)
            self.optim_wrapper = self.build_optim_wrapper(self.optim_wrapper)
        strategy.prepare(
            self.model,
            optim_wrapper=self.optim_wrapper,
            dispatch_kwargs={
                "max_iters": self.max_iters if trains else 0,
                "epoch_length": _length(self.train_dataloader) if trains else 0,
                "init_weights_for_test_or_val": trains or self.cfg.get("init_weights_for_test_or_val", True),
            },
        )
        self.model = strategy.model
        if trains and self.param_schedulers is not None:
            strategy.param_schedulers = self.param_schedulers


def _length(loader: Any) -> int | None:
    """Return the number of batches of a rank, or None if the loader has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


class _Strategy(FSDPStrategy):
    """Shares the runner's directory of logs: its own would have a later time as name, and stay empty."""

    def __init__(self, timestamp: str, **kwargs: Any) -> None:
        self._of_runner = timestamp
        super().__init__(**kwargs)

    def _setup_env(self, **kwargs: Any) -> None:
        super()._setup_env(**kwargs)
        self._timestamp = self._of_runner

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Return the runner's logger."""
        return MMLogger.get_current_instance()


def let_shard(runner: Runner, model_wrapper: Any) -> None:
    """Turn a runner into a `ShardingRunner`. Collective: every rank.

    Args:
        runner: A runner without a model; its class may be derived from Runner.
        model_wrapper: Config of the wrapper. Not changed.
    """
    cls = type(runner)
    runner.__class__ = type(cls.__name__, (ShardingRunner, cls), {"__doc__": cls.__doc__})
    randomness = dict(runner._randomness_cfg)
    assert runner.seed is not None
    base_seed = runner.seed - (runner.rank if randomness.get("diff_rank_seed") else 0)
    before = random_state()  # the runner has seeded and used the generators already
    runner.strategy = _Strategy(
        runner.timestamp,
        work_dir=runner.work_dir,
        model_wrapper=plain(model_wrapper),
        state_dict_cfg=plain(runner.cfg.get("state_dict_cfg", "full")),
        sync_bn=runner.cfg.get("sync_bn"),
        global_batch_size=runner.cfg.get("global_batch_size"),
        env_kwargs={"launcher": runner.launcher, "randomness": {**randomness, "seed": base_seed}},
    )
    restore_random_state(before)
    runner.strategy._randomness = randomness  # without a seed, the checkpoint's is used without a warning
    runner.build_dataloader = with_patient_workers(runner.build_dataloader)
    if runner._train_dataloader is not None:
        runner._train_dataloader = runner.strategy.divide_loader(runner._train_dataloader)


def with_patient_workers(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds data loaders with workers as `mmfsdp.patient_workers` makes them.

    Args:
        build: Builds a data loader.
    """

    def build_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if isinstance(loader, DataLoader):
            patient_workers(loader)
        return loader

    return build_dataloader
