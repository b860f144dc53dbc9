"""`FSDPStrategy`: shards a model for MMEngine's FlexibleRunner, and saves, loads and resumes its training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from mmengine.device import get_device
from mmengine.dist import infer_launcher, is_distributed
from mmengine.model import is_model_wrapper
from mmengine.optim import BaseOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch.optim import Optimizer

from mmfsdp import FullyShardedDataParallel
from mmfsdp.collective import scope_of
from mmfsdp.errors import ConfigError
from mmfsdp.runtime import find_sharded_model
from mmfsdp_mmengine.checkpoints.pending import PendingWeights
from mmfsdp_mmengine.checkpoints.strategy_states import CheckpointingStrategy
from mmfsdp_mmengine.configs.agreement import check_alike
from mmfsdp_mmengine.configs.arguments import (
    activation_arguments,
    copied,
    plain,
    state_dict_settings,
)
from mmfsdp_mmengine.configs.empty_models import without_weights
from mmfsdp_mmengine.configs.environment import check_environment
from mmfsdp_mmengine.configs.global_batch import divide_loader
from mmfsdp_mmengine.configs.lookup import check_known
from mmfsdp_mmengine.configs.others import OTHER_MODEL_WRAPPERS
from mmfsdp_mmengine.configs.unknown import refuse_unknown
from mmfsdp_mmengine.optimizers.amp import check_scaled, use_scaler_of
from mmfsdp_mmengine.optimizers.binding import (
    OptimizerBinding,
    check_optimizer_named,
    optim_wrappers_of,
    with_optimizers,
)
from mmfsdp_mmengine.processes.distributed import start_alone, start_process_group
from mmfsdp_mmengine.processes.leaving import leave_in_order
from mmfsdp_mmengine.registry import STRATEGIES, replace_stock
from mmfsdp_mmengine.wrappers.sync_bn import synchronise_batch_norm

__all__ = ["FSDPStrategy"]


class FSDPStrategy(CheckpointingStrategy):
    """Shards the model with `MMFullyShardedDataParallel` or a class derived from it.

    Runs on CUDA with NCCL and on the CPU with gloo, under a launcher or as a single process. Optimizers are built from
    the model before it is sharded: optimizer constructors see the original names and shapes.

    Args:
        model_wrapper: Config of the wrapper. Default: ``dict(type='MMFullyShardedDataParallel')``.
        skip_init_weights: Build the model without memory for its parameters, which ``load_from`` or ``resume`` then
            fills. Training before weights are loaded raises an error.
        state_dict_cfg: ``'local'``: a checkpoint is a directory with a file per rank. ``'full'``: one file, as
            MMEngine's DDPStrategy writes it. ``'sharded'``: a directory of torch's distributed checkpoint.
            Or a dict of ``state_dict_type``, ``state_dict_config`` and ``optim_state_dict_config`` as torch names
            them. Checkpoints of every kind load whatever this setting is, on any number of ranks.
        activation_checkpointing: ``dict(check_fn=...)`` with a name, a callable or ``dict(type=..., **arguments)``, and
            the other arguments of torch's ``apply_activation_checkpointing``; or core's settings, such as ``'full'`` or
            ``dict(mode='ops')``.
        global_batch_size: Samples per iteration, over all ranks, however many there are: each takes its share, in parts
            of at most ``train_dataloader.batch_size`` samples, and steps once. By default each takes ``batch_size``.
        **kwargs: Arguments of MMEngine's DDPStrategy.

    Raises:
        ConfigError: A setting is unknown or has a value that is not accepted.
    """

    model: nn.Module
    optim_wrapper: Any
    param_schedulers: Any

    def __init__(
        self,
        *,
        model_wrapper: Mapping[str, Any] | None = None,
        skip_init_weights: bool = False,
        state_dict_cfg: str | Mapping[str, Any] = "local",
        activation_checkpointing: Any = None,
        global_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown("FSDPStrategy", kwargs, _known_arguments(), "strategy")
        settings = state_dict_settings(state_dict_cfg)
        super().__init__(settings.kind, model_wrapper=model_wrapper, **kwargs)
        if not isinstance(skip_init_weights, bool):
            raise ConfigError(
                f"skip_init_weights must be True or False, got {skip_init_weights!r}.", config="skip_init_weights"
            )
        self.skip_init_weights = skip_init_weights
        self.state_dict_type = settings.state_dict_type
        self.activation_checkpointing = activation_checkpointing
        self.global_batch_size = global_batch_size
        self._prepared: bool  # set by MMEngine
        self._structure: nn.Module | None = None

    def prepare(
        self,
        model: nn.Module | dict[str, Any],
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: dict[str, Any] | bool = False,
        dispatch_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Build the model and optimizers, shard, and build schedulers. Collective: every rank.

        Args:
            model: A model or its config.
            optim_wrapper: An optimizer, an optimizer wrapper, several by name, or a config of these.
            param_scheduler: Schedulers or their configs.
            compile: Whether, or with which arguments, to compile.
            dispatch_kwargs: Values that the runner knows: ``max_iters``, ``max_epochs``, ``epoch_length`` and the like.

        Returns:
            The sharded model, or a list of the model, the optimizer wrapper and the schedulers that there are.

        Raises:
            RankMismatchError: Ranks have different numbers of iterations, or different settings of the optimizers.
            MmfsdpError: See `mmfsdp.shard`.
            GradScalerError: The model computes in float16, and the optimizer wrapper has no gradient scaler.
        """
        lengths = {name: (dispatch_kwargs or {}).get(name) for name in ("epoch_length", "max_epochs", "max_iters")}
        check_alike({**lengths, "optim_wrapper": optim_wrapper, "param_scheduler": param_scheduler}, scope_of(None))
        has_optim = hasattr(self, "optim_wrapper")
        if self._prepared and (optim_wrapper is None or has_optim):
            return self._prepared_components()
        self.dispatch_kwargs.update(dispatch_kwargs or {})
        if not self._prepared:
            self._shard(self._init_model_weights(self.build_model(model)), optim_wrapper)
        elif self._structure is not None:  # a validation prepared the model already
            self._bind(OptimizerBinding(self._structure, self.build_optim_wrapper(optim_wrapper, self._structure)))
            plan = find_sharded_model(self.model).plan
            if (chosen := with_optimizers(plan, self.optim_wrapper)) is not plan:
                self.logger.info(f"Sharding plan with its optimizer:\n{chosen.table()}")
        self.model = self.compile_model(self.model, compile)
        if param_scheduler is not None:
            self.param_schedulers = self.build_param_scheduler(param_scheduler, self.optim_wrapper)
        self._prepared = True
        return self._prepared_components()

    def _shard(self, model: nn.Module, optim_wrapper: Any) -> None:
        if optim_wrapper is None:
            self._structure = None if is_model_wrapper(model) else _structure_of(model)
            self.model = self._wrap_model(model)
            return
        binding = OptimizerBinding(model, self.build_optim_wrapper(optim_wrapper, model))
        self.model = self._wrap_model(model, binding.optim_wrapper)
        self._bind(binding)

    def _bind(self, binding: OptimizerBinding) -> None:
        optim, plan = binding.optim_wrapper, find_sharded_model(self.model).plan
        wrappers = [*optim_wrappers_of(optim).values()]
        check_scaled(plan, wrappers)
        binding.bind(self.model, plan)
        use_scaler_of(self.model, wrappers)
        self.optim_wrapper = optim
        self._scale_lr()
        self._count_iterations(0)

    def divide_loader(self, dataloader: Any) -> Any:
        """Return the config of the training data with this rank's share of the global batch; see `divide_loader`."""
        return dataloader if self.global_batch_size is None else divide_loader(dataloader, self.global_batch_size)

    def build_model(self, model: nn.Module | dict[str, Any]) -> nn.Module:
        """Build the model if it is a config; with ``skip_init_weights`` its parameters are on the meta device."""
        if self.skip_init_weights and isinstance(model, Mapping):
            with without_weights():
                built: nn.Module = super().build_model(model)
            return built
        built = super().build_model(model)
        return built

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Convert the batch norm layers as ``sync_bn`` says: see `synchronise_batch_norm`."""
        return synchronise_batch_norm(model, self.sync_bn, get_device(), self.world_size)

    def compile_model(self, model: nn.Module, compile: dict[str, Any] | bool = False) -> nn.Module:
        """Compile the model's ``forward``, which its own ``train_step`` calls too, and return the wrapper.

        Args:
            model: The wrapper.
            compile: Whether to compile, or the arguments of ``torch.compile``. Not changed. ``target`` names a method.
                Runners name ``train_step``, which torch cannot compile as a whole under sharding: ``forward`` is
                compiled instead.
        """
        if compile is not False:
            settings: dict[str, Any] = {} if compile is True else plain(compile)
            if settings.get("target") == "train_step":
                settings["target"] = "forward"
            super().compile_model(model.module, settings)
        return model

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> Any:
        """Return an optimizer wrapper; see MMEngine's `BaseStrategy.build_optim_wrapper`.

        Args:
            optim_wrapper: An optimizer, an optimizer wrapper, several by name, or a config of these. Not changed.
            model: The model, not sharded yet.

        Raises:
            ConfigError: The config names no optimizer and no constructor.
        """
        check_optimizer_named(optim_wrapper)
        if isinstance(optim_wrapper, Optimizer):
            return OptimWrapper(optim_wrapper)
        if isinstance(optim_wrapper, BaseOptimWrapper):
            return optim_wrapper
        return super().build_optim_wrapper(copied(optim_wrapper), model)

    def _setup_env(self, *, launcher: str | None = None, dist_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        check_environment(super()._setup_env, {**kwargs, "launcher": launcher, "dist_cfg": dist_cfg})
        launcher = launcher or infer_launcher()
        if launcher == "none" and not is_distributed():
            start_alone(**(dist_cfg or {}))
        super()._setup_env(launcher=launcher, dist_cfg=dist_cfg, **kwargs)
        leave_in_order()

    def _setup_distributed(self, launcher: str = "pytorch", backend: str | None = None, **kwargs: Any) -> None:
        if not is_distributed():
            start_process_group(launcher, backend, **kwargs)

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        """Run the model's own initialisation of the whole model on every rank; sharding broadcasts the first rank's."""
        wanted = self.dispatch_kwargs.get("init_weights_for_test_or_val", True)
        if hasattr(model, "init_weights") and wanted and not self.skip_init_weights and not is_model_wrapper(model):
            model.init_weights()  # type: ignore[operator]
        return model

    def _wrap_model(self, model: nn.Module, optim_wrapper: Any = None) -> nn.Module:
        if is_model_wrapper(model):
            return model
        config: dict[str, Any] = plain(self.model_wrapper or {})
        module = self.convert_model(model)
        defaults: dict[str, Any] = {"type": "MMFullyShardedDataParallel", "module": module}
        if self.activation_checkpointing is not None:
            if config.get("activation_checkpointing") is not None:
                raise ConfigError(
                    "activation_checkpointing is set in strategy and in strategy.model_wrapper. Set it in one of them.",
                    config="strategy.activation_checkpointing",
                )
            config["activation_checkpointing"] = activation_arguments(self.activation_checkpointing, module)
        if self.skip_init_weights:
            self._pending = PendingWeights(model)
            if config.get("param_init_fn") is None:
                config["param_init_fn"] = self._pending.allocate
        with MODEL_WRAPPERS.switch_scope_and_registry(None) as registry:
            check_known(config, registry, "strategy.model_wrapper")
        kind = config.get("type")
        name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
        if name in OTHER_MODEL_WRAPPERS:  # which cannot be built from a module
            raise _no_wrapper(name)
        wrapped: nn.Module = MODEL_WRAPPERS.build(config, default_args=defaults)
        if not isinstance(wrapped, FullyShardedDataParallel):
            raise _no_wrapper(type(wrapped).__name__)
        if self._pending is not None:
            self._pending.guard(wrapped)
        self.logger.info(f"Sharding plan:\n{with_optimizers(wrapped.plan, optim_wrapper).table()}")
        return wrapped

    def _build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: dict[str, Any]) -> Any:
        # MMEngine removes values from the dict, which several optimizers share.
        return super()._build_param_scheduler(scheduler, optim_wrapper, dict(default_args))


def _no_wrapper(name: str) -> ConfigError:
    """Return the error for a wrapper that does not shard."""
    other = "the strategy of its library" if name in OTHER_MODEL_WRAPPERS else "DDPStrategy"
    return ConfigError(
        f"FSDPStrategy needs MMFullyShardedDataParallel or a class derived from it as model_wrapper, got {name}. Use "
        f"{other} with that wrapper.",
        config="strategy.model_wrapper.type",
    )


def _known_arguments() -> list[str]:
    """Return the names of the arguments of the strategy and of the classes that it derives from."""
    parameters = [item for cls in FSDPStrategy.__mro__ for item in inspect.signature(cls.__init__).parameters.values()]
    return [item.name for item in dict.fromkeys(parameters) if item.kind is item.KEYWORD_ONLY]


replace_stock(STRATEGIES, FSDPStrategy)


def _structure_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device; tied ones stay tied.

    Args:
        model: A model that is not sharded. Not changed.
    """
    memo: dict[int, object] = {}
    for param in model.parameters():
        memo[id(param)] = copied = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(copied).update(vars(param))
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
