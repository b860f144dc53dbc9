"""`MMFullyShardedDataParallel`: a sharded model that MMEngine's runners and loops can train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import OptimWrapper
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from mmfsdp import FullyShardedDataParallel
from mmfsdp.errors import ConfigError
from mmfsdp.runtime import LossReach, keep_buffers_alike
from mmfsdp_mmengine.configs.arguments import wrapper_arguments
from mmfsdp_mmengine.configs.global_batch import Parts
from mmfsdp_mmengine.optimizers.binding import optim_wrappers_of
from mmfsdp_mmengine.registry import MODEL_WRAPPERS, replace_stock
from mmfsdp_mmengine.wrappers.anomalies import unreached_logged
from mmfsdp_mmengine.wrappers.forward_steps import forward_batch, forwards_reach, overrides

__all__ = ["MMFullyShardedDataParallel"]

_SETTINGS = ("_accumulative_counts", "_max_counts", "_remainder_counts")
_UNCOUNTED = (
    "global_batch_size divides this batch into parts, and needs a step that calls update_params() of each OptimWrapper "
    "once. The model's own train_step, or its optimizer wrapper, does not. Leave global_batch_size out, and set "
    "train_dataloader.batch_size and accumulative_counts for the number of ranks."
)


class MMFullyShardedDataParallel(FullyShardedDataParallel):
    """Shards a model and runs its train, val and test steps.

    Collective: every rank, with equal models and arguments. Arguments are not changed, which lets a config be built
    twice. Functions and policies can be given by name, in MMEngine's FUNCTIONS, in `FSDP_WRAP_POLICIES`, or as
    ``'package.module:attribute'``; ``dict(type=..., **arguments)`` binds arguments to them.

    Args:
        module: The model to shard.
        process_group: A group, a (shard, replicate) pair of groups, a dict of arguments of
            ``torch.distributed.new_group``, or ``dict(type=..., **arguments)`` for a function that makes one.
        sharding_strategy: ``'FULL_SHARD'``, ``'SHARD_GRAD_OP'``, ``'NO_SHARD'``, ``'HYBRID_SHARD'`` or
            ``'_HYBRID_SHARD_ZERO2'``, or torch's enum member.
        cpu_offload: bool, ``CPUOffload`` or a dict of its fields.
        auto_wrap_policy: A policy, its name, ``dict(type=..., **arguments)`` in which module classes may be named, or
            ``dict(kind=...)`` with the fields of a policy that core declares.
        backward_prefetch: ``'pre'``, ``'post'``, ``'BACKWARD_PRE'``, ``'BACKWARD_POST'``, torch's enum member, or None
            for no prefetching.
        mixed_precision: ``MixedPrecision``, a dict of its fields with dtypes in any spelling, or a preset such as
            ``'bf16'``.
        param_init_fn: A function of one module, its name, or ``dict(type=..., **arguments)``.
        use_orig_params: ``False`` selects engine ``fsdp1``.
        broadcast_buffers: Broadcast the first rank's buffers before each forward, as DistributedDataParallel does.
        detect_anomalous_params: Log, after every step, the parameters that the loss does not reach. Slow.
        **kwargs: Further arguments of torch's class, by their names in any version, ``engine``, ``config`` and
            ``activation_checkpointing``: see `mmfsdp.torch_style.translate_arguments`.

    Raises:
        PolicyNotFoundError: No function has a given name.
        MmfsdpError: See `mmfsdp.shard`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = "BACKWARD_PRE",
        mixed_precision: Any = None,
        param_init_fn: Any = None,
        use_orig_params: bool = True,
        broadcast_buffers: bool = False,
        detect_anomalous_params: bool = False,
        **kwargs: Any,
    ) -> None:
        arguments = wrapper_arguments(
            module,
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            use_orig_params=use_orig_params,
            **kwargs,
        )
        super().__init__(module, **arguments)
        self.detect_anomalous_params = detect_anomalous_params
        self._reach: LossReach | None = None
        if broadcast_buffers:
            keep_buffers_alike(self)
        device = next((param.device for param in self.parameters()), torch.device("cpu"))
        for part in self.modules():
            if isinstance(part, BaseDataPreprocessor):
                part.to(device)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Preprocess, forward in mode ``'loss'``, and update parameters. Collective: every rank.

        A model's own ``train_step`` runs instead, if it has one.

        Args:
            data: A batch from the data loader; or `Parts` of one, for which parameters are updated once.
            optim_wrapper: The optimizer wrapper of the model's parameters.

        Returns:
            The losses to log.

        Raises:
            TypeError: The data preprocessor returned neither a dict nor a list or tuple.
        """
        if not self.detect_anomalous_params:
            return self._train_step(data, optim_wrapper)
        if self._reach is None:
            self._reach = LossReach(self)
        with unreached_logged(self._reach, optim_wrapper):
            return self._train_step(data, optim_wrapper)

    def _train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        if isinstance(data, Parts):
            return _train_in_parts(data, lambda part: self._train_step(part, optim_wrapper), optim_wrapper)
        if overrides(self.module, "train_step"):
            with self._forwards_reach():
                log_vars: dict[str, torch.Tensor] = self._model.train_step(data, optim_wrapper)
            return log_vars
        with optim_wrapper.optim_context(self):
            data = self._model.data_preprocessor(data, True)
            losses = self._run_forward(data, "loss")
        loss, log_vars = self._model.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: Any) -> Any:
        """Return the model's predictions, or the result of its own ``val_step``. Collective: every rank."""
        return self._predict(data, "val_step")

    def test_step(self, data: Any) -> Any:
        """Return the model's predictions, or the result of its own ``test_step``. Collective: every rank."""
        return self._predict(data, "test_step")

    def _predict(self, data: Any, step: str) -> Any:
        if overrides(self.module, step):
            with self._forwards_reach():
                return getattr(self.module, step)(data)
        return self._run_forward(self._model.data_preprocessor(data, False), "predict")

    @property
    def _model(self) -> Any:
        """The model, typed as Any because its methods are unknown to a type checker."""
        return self.module

    def _run_forward(self, data: Any, mode: str) -> Any:
        return forward_batch(self, data, mode)

    def _forwards_reach(self) -> AbstractContextManager[None]:
        return forwards_reach(self, self.module, through_wrapper=isinstance(self, TorchFSDP))


replace_stock(MODEL_WRAPPERS, MMFullyShardedDataParallel)


def _train_in_parts(
    parts: Parts, train: Callable[[Any], dict[str, torch.Tensor]], optim_wrapper: Any
) -> dict[str, torch.Tensor]:
    """Train on each part, and update parameters after the last one. Collective: every rank, with as many parts.

    Args:
        parts: The parts of a batch.
        train: Computes a part and calls ``update_params`` of the optimizer wrappers.
        optim_wrapper: The optimizer wrapper, or several by name.

    Returns:
        The mean of what ``train`` returned.

    Raises:
        ConfigError: The model's own ``train_step`` does not update parameters through ``update_params``.
    """
    wrappers = [*optim_wrappers_of(optim_wrapper).values()]
    with _counting_parts(wrappers, len(parts)):
        logs = [train(part) for part in parts]
    return {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}  # type: ignore[misc]


@contextmanager
def _counting_parts(wrappers: Sequence[Any], num: int) -> Iterator[None]:
    """Let optimizer wrappers count parts in place of iterations, for one iteration."""
    if not all(isinstance(wrapper, OptimWrapper) for wrapper in wrappers):
        raise ConfigError(_UNCOUNTED, config="strategy.global_batch_size")
    done = [wrapper._inner_count for wrapper in wrappers]
    before = [{name: getattr(wrapper, name) for name in _SETTINGS} for wrapper in wrappers]
    for wrapper, count, settings in zip(wrappers, done, before, strict=True):
        wrapper._inner_count = count * num
        for name, value in settings.items():
            setattr(wrapper, name, value * num if value > 0 else value)
    try:
        yield
        if any(wrapper._inner_count != (count + 1) * num for wrapper, count in zip(wrappers, done, strict=True)):
            raise ConfigError(_UNCOUNTED, config="strategy.global_batch_size")
    finally:
        for wrapper, count, settings in zip(wrappers, done, before, strict=True):
            wrapper._inner_count = count + 1
            for name, value in settings.items():
                setattr(wrapper, name, value)
