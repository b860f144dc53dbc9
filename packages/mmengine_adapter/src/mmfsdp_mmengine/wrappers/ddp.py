"""`MMDistributedDataParallel`: MMEngine's wrapper, which here also runs on the CPU and uses a model's train_step."""

from __future__ import annotations

import inspect
from typing import Any

import mmengine.model
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.runtime import LossReach
from mmfsdp.torch_style import ARGUMENTS
from mmfsdp_mmengine.configs.unknown import refuse_unknown
from mmfsdp_mmengine.registry import MODEL_WRAPPERS, replace_stock
from mmfsdp_mmengine.wrappers.anomalies import unreached_logged
from mmfsdp_mmengine.wrappers.forward_steps import forward_batch, forwards_reach, overrides

__all__ = ["MMDistributedDataParallel"]


_OF_SHARDS = dict.fromkeys(ARGUMENTS, "It belongs to the wrapper with type='MMFullyShardedDataParallel'.")


class MMDistributedDataParallel(mmengine.model.MMDistributedDataParallel):
    """Replicates a model with torch's DistributedDataParallel and runs its train, val and test steps.

    Collective: every rank, with equal models.

    Args:
        module: The model to replicate.
        detect_anomalous_params: Log, after every step, the parameters that the loss does not reach. Slow.
        **kwargs: Arguments of torch's class. ``device_ids`` and ``output_device`` are ignored on the CPU, where
            torch rejects them.

    Raises:
        ConfigError: torch's class has no argument of that name.
    """

    def __init__(self, module: nn.Module, detect_anomalous_params: bool = False, **kwargs: Any) -> None:
        known = [*inspect.signature(DistributedDataParallel).parameters, "detect_anomalous_params"]
        refuse_unknown("MMDistributedDataParallel", kwargs, known, "model_wrapper", _OF_SHARDS)
        if not torch.cuda.is_available():
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
        super().__init__(module=module, detect_anomalous_params=detect_anomalous_params, **kwargs)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Preprocess, forward in mode ``'loss'``, and update parameters. Collective: every rank.

        A model's own ``train_step`` runs instead, if it has one.

        Args:
            data: A batch from the data loader.
            optim_wrapper: The optimizer wrapper of the model's parameters.

        Returns:
            The losses to log.
        """
        if not self.detect_anomalous_params:
            return self._train_step(data, optim_wrapper)
        with unreached_logged(LossReach(self.module), optim_wrapper):
            return self._train_step(data, optim_wrapper)

    def _train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        if overrides(self.module, "train_step"):
            with forwards_reach(self, self.module, through_wrapper=True):
                own_vars: dict[str, torch.Tensor] = self.module.train_step(data, optim_wrapper)
            return own_vars
        with optim_wrapper.optim_context(self):
            data = self.module.data_preprocessor(data, True)
            losses = self._run_forward(data, "loss")
        log_vars: dict[str, torch.Tensor]
        loss, log_vars = self.module.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def _run_forward(self, data: Any, mode: str) -> Any:
        return forward_batch(self, data, mode)


replace_stock(MODEL_WRAPPERS, MMDistributedDataParallel)
