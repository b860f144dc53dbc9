"""`EMAHook`: MMEngine's hook, for sharded models too."""

from __future__ import annotations

import logging
from typing import Any

import mmengine.hooks
import torch.nn as nn
from mmengine.hooks.ema_hook import EMAHook as StockEMAHook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper

from mmfsdp import FullyShardedDataParallel
from mmfsdp.basics import WRAPPER_PREFIX
from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.checkpoints.averages import RecordedLoad, ShardAverages, averaged_model_class
from mmfsdp_mmengine.checkpoints.live_content import describe_mismatch, revised_keys
from mmfsdp_mmengine.registry import HOOKS, replace_stock

__all__ = ["EMAHook"]

_WRAPPED = [(r"^module\.", "")]


class EMAHook(StockEMAHook):
    """Averages the weights, validates and tests with the averages, and saves both.

    Each rank averages its own shard of a sharded model. For every model, resuming works whether the runner loads
    before or after ``before_run``, and the averages outlive training: a test in the same run uses them, like a test of
    the checkpoint (MMEngine's hook would test the trained weights).

    Args:
        ema_type: The averaged model: a registered name, or a class derived from MMEngine's ``BaseAveragedModel``.
        strict_load: Raise, before anything is loaded, if the source of the averages does not match the model. The
            source is the saved averages when resuming, otherwise the checkpoint's weights.
        begin_iter: The first iteration to average.
        begin_epoch: The first epoch to average; do not combine it with ``begin_iter``.
        **kwargs: Arguments of the averaged model.

    Raises:
        ConfigError: ``ema_type`` is not an averaged model, or does not accept ``kwargs``; raised when the run begins.
        StateDictError: See ``strict_load``; raised on every rank.
    """

    def __init__(
        self,
        ema_type: str | type = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(ema_type, strict_load, begin_iter, begin_epoch, **kwargs)
        self._source: nn.Module | None = None
        self._sharded: ShardAverages | None = None
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._is_behind = False
        self._are_swapped = False
        if type(self).after_load_checkpoint is not EMAHook.after_load_checkpoint:
            # A derived class may use the averages there without calling this class: mmpretrain's does.
            self.after_load_checkpoint = self._load_as_derived  # type: ignore[method-assign]

    @property
    def src_model(self) -> nn.Module:
        """The source of the averages: the model, or this rank's part of a sharded model."""
        if self._sharded is not None:
            return self._sharded.source()
        assert self._source is not None, "EMAHook knows its model once the run has begun"
        return self._source

    @src_model.setter
    def src_model(self, model: nn.Module) -> None:
        self._source = model

    def before_run(self, runner: Any) -> None:
        """Create the averages, unless this model has some already."""
        model = runner.model
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"EMAHook averages a model, but the runner's model is {type(model).__name__!r}. Give the runner a "
                "model, or remove EMAHook from custom_hooks.",
                config="custom_hooks.EMAHook",
            )
        if isinstance(model, FullyShardedDataParallel):
            if self._sharded is None or not self._sharded.are_of(model):
                self._sharded = ShardAverages(model, self.ema_cfg)
                self.ema_model = self._sharded.averaged
                self._is_behind = True
            return
        bare = model.module if is_model_wrapper(model) else model
        if self._source is not bare:
            averaged_model_class(self.ema_cfg)
            super().before_run(runner)

    def before_train(self, runner: Any) -> None:
        """Load the averages of a checkpoint that was loaded."""
        super().before_train(runner)
        self._catch_up()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the averages to the checkpoint; the strategy has added those of a sharded model already."""
        if self._sharded is None:
            checkpoint["state_dict"] = revised_keys(checkpoint["state_dict"], _WRAPPED)
            super().before_save_checkpoint(runner, checkpoint)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Pass the trained weights on to the model, and keep the averages until all ranks can load them."""
        checkpoint["state_dict"] = revised_keys(checkpoint["state_dict"], _WRAPPED)
        if not isinstance(runner.model, FullyShardedDataParallel):
            if self._source is None:
                self.before_run(runner)
            super().after_load_checkpoint(runner, checkpoint)
            return
        if self.strict_load:
            self.before_run(runner)  # FlexibleRunner loads first
            assert self._sharded is not None
            resumes = runner._resume and "ema_state_dict" in checkpoint
            self._sharded.check(checkpoint["state_dict"], checkpoint["ema_state_dict"] if resumes else None)
        self._is_behind = True
        if "ema_state_dict" not in checkpoint or not runner._resume:
            if runner._resume:
                print_log(
                    "EMAHook: the checkpoint has no 'ema_state_dict'. Averaging starts from its weights.",
                    "current",
                    logging.WARNING,
                )
            return
        own = {key: value for key, value in checkpoint["ema_state_dict"].items() if not key.startswith(WRAPPER_PREFIX)}
        trained = {key: value for key, value in checkpoint["ema_state_dict"].items() if key not in own}
        self._loaded = checkpoint["state_dict"], own
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **revised_keys(trained, _WRAPPED)}

    def _load_as_derived(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Call the derived class's own method, with averages that it can load into before there is a model for them."""
        own = type(self).after_load_checkpoint
        checkpoint["state_dict"] = revised_keys(checkpoint["state_dict"], _WRAPPED)
        if not isinstance(runner.model, FullyShardedDataParallel):
            if self._source is None:
                self.before_run(runner)
            own(self, runner, checkpoint)
            return
        before, self.ema_model = vars(self).get("ema_model"), RecordedLoad()
        recorded = self.ema_model
        try:
            own(self, runner, checkpoint)
        finally:
            if self.ema_model is recorded:
                self.ema_model = before
        if recorded.averages is None:
            return
        if self.strict_load:
            self.before_run(runner)
            assert self._sharded is not None
            self._sharded.check(recorded.averages, recorded.own)
        self._is_behind, self._loaded = True, (recorded.averages, recorded.own or {})

    def _swap_ema_parameters(self) -> None:
        """Swap the weights and the averages, which are loaded first if a checkpoint has some."""
        self._catch_up()
        super()._swap_ema_parameters()
        self._are_swapped = not self._are_swapped

    def give_back_weights(self) -> None:
        """Give the model its own weights, if it has the averages, as in a validation. Collective: every rank."""
        if self._are_swapped:
            self._swap_ema_parameters()

    def _catch_up(self) -> None:
        """Load the averages, or copy the weights, after loading or initialisation. Collective: every rank."""
        if self._sharded is None or not self._is_behind:
            return
        self._is_behind = False
        if self._loaded is None:
            self._sharded.follow()
            return
        (averages, own), self._loaded = self._loaded, None
        report = self._sharded.load(averages, own, strict=self.strict_load)
        if not report.clean:
            print_log(f"EMAHook: {describe_mismatch(report)}", "current", logging.WARNING)


replace_stock(HOOKS, EMAHook)
# Hooks derived from MMEngine's, such as mmpretrain's, shall derive from this one, whichever was imported first.
mmengine.hooks.EMAHook = EMAHook
for _derived in StockEMAHook.__subclasses__():
    if _derived is not EMAHook:
        _derived.__bases__ = tuple(EMAHook if base is StockEMAHook else base for base in _derived.__bases__)
