"""`AveragedModel`: averages of a sharded model's weights, which take the memory of one shard on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import swa_utils

from mmfsdp.basics.text import WRAPPER_PREFIX, name_list
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import ConfigError, ShardStateError, StateDictError, UnsupportedCallError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.state.extra_states import is_extra
from mmfsdp.state.lazy_tensors import LazyTensor, locate, whole_box, whole_value
from mmfsdp.state.local_view import LocalView, exchanged
from mmfsdp.state.model import load_model_state_dict, model_state_dict
from mmfsdp.state.report import LoadReport, compare_shapes

__all__ = ["AVERAGES", "AveragedModel", "check_averages_of", "compare_averages"]

AVERAGES = "ema_state_dict"
"""The key of averages in a checkpoint, under which conversions find them, too."""

_COUNT = "n_averaged"
_LATE = 1_000_000  # an update by which a warm-up is over


class AveragedModel:
    """Averages the weights of a sharded model while it trains, as ``torch.optim.swa_utils.AveragedModel`` does.

    torch's class, which cannot copy a sharded model, averages what each rank holds: an update sends nothing, and the
    averages take the memory of one shard. Evaluate with them inside `average_parameters`::

        averaged = mmfsdp.AveragedModel(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            averaged.update_parameters()
        with averaged.average_parameters():
            evaluate(model)

    Args:
        model: A sharded model. With engine ``fsdp1`` making averages is collective.
        decay: The share of the averages that an update keeps: a number from 0 to 1, or a function that returns it for
            the number of updates before, such as ``lambda n: min(0.999, (1 + n) / (10 + n))``.
        avg_fn: In place of ``decay``, torch's function of an average, a weight and the number of updates. It must
            compute each element by itself. Without any of the three all weights count equally.
        multi_avg_fn: The same for lists of tensors.
        use_buffers: Average buffers, too. Otherwise an update copies them.

    Raises:
        ShardStateError: The model is not sharded.
        ConfigError: ``decay`` is not from 0 to 1; it is so large that averages in the dtype of the weights would not
            move; or there is more than one of ``decay``, ``avg_fn`` and ``multi_avg_fn``.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] | None = None,
        *,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
        use_buffers: bool = False,
    ) -> None:
        self._state = find_sharded_model(model)
        if [decay, avg_fn, multi_avg_fn].count(None) < 2:
            raise ConfigError("Pass only one of decay, avg_fn and multi_avg_fn: each says how to average.")
        if decay is not None:
            _check_decay(decay, model)
            multi_avg_fn = self._decay_all
        self._decay = decay
        self._view = LocalView(model)
        self._averages = swa_utils.AveragedModel(
            self._view.tree(), avg_fn=avg_fn, multi_avg_fn=multi_avg_fn, use_buffers=use_buffers
        )
        self._is_shown = False

    @property
    def n_averaged(self) -> int:
        """The number of updates."""
        return int(self._averages.n_averaged)

    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Average the weights that the model has now; the first update copies them. Not collective; every rank.

        Args:
            model: The sharded model, if given; torch's class takes it.

        Raises:
            ShardStateError: It is another model, or the model holds the averages.
        """
        self._check_hidden("update_parameters()")
        if model is not None and not self.is_of(model):
            raise ShardStateError(
                f"update_parameters() was given another {type(model).__name__} than AveragedModel. Pass the model that "
                "it was made from, or nothing."
            )
        self._averages.update_parameters(self._view.tree())

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Give the model the averages within the context, to evaluate or to save them. Collective: every rank.

        Weights and averages are exchanged, one tensor at a time, without messages or more memory. Do not train inside.

        Raises:
            ShardStateError: The model holds the averages already.
        """
        self._check_hidden("average_parameters()")
        self._begin()
        with exchanged(self._view, self._averages.module):
            self._is_shown = True
            try:
                yield
            finally:
                self._is_shown = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``n_averaged`` and, as ``module.NAME``, the averages. Collective: every rank.

        `save_checkpoint` and `CheckpointManager` save it if they are given the averages.

        Returns:
            A dict of DTensors, which share the memory of the averages, except with engine ``fsdp1``.

        Raises:
            ShardStateError: The model holds the averages.
        """
        self._check_hidden("state_dict()")
        self._begin()
        return {
            _COUNT: self._averages.n_averaged.clone(),
            **{f"{WRAPPER_PREFIX}{name}": value for name, value in self._weights().items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; each rank loads its own part. Collective: every rank.

        Args:
            state_dict: What `state_dict` returned, on any number of ranks, as `load_checkpoint` returns it; or the
                state dict of torch's class, with whole tensors.

        Raises:
            StateDictError: It is no such state, or does not fit the model; raised on every rank; nothing is changed.
            ShardStateError: The model holds the averages.
        """
        self._check_hidden("load_state_dict()")
        scope = self._state.scope
        count, weights = on_all_ranks(lambda: _parts(state_dict), scope)
        locate([(count, whole_box(count))] if isinstance(count, LazyTensor) else [], scope)
        number = on_all_ranks(lambda: int(whole_value(count)), scope)
        own = self._extra_states()
        with exchanged(self._view, self._averages.module):
            load_model_state_dict(self._state.module, {**own, **weights})
        self._averages.n_averaged.fill_(number)

    def is_of(self, model: nn.Module) -> bool:
        """Return whether these are averages of ``model``. Not collective."""
        return find_sharded_model(model) is self._state

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a forward, which torch's class has."""
        raise UnsupportedCallError(
            "An AveragedModel of shards has no forward of its own. Write `with averaged.average_parameters():`, and "
            "call the model inside."
        )

    def _begin(self) -> None:
        """Let the averages be the weights as long as nothing is averaged."""
        if not self.n_averaged:
            self._averages.module.load_state_dict(self._view.tree().state_dict())

    def _decay_all(self, averages: Any, weights: Any, num_averaged: Any) -> None:
        # Asks the counter on the CPU: torch gives a copy on the device.
        rate = self._decay(self.n_averaged) if callable(self._decay) else self._decay
        _check_rate(rate)
        swa_utils.get_ema_multi_avg_fn(rate)(averages, weights, num_averaged)

    def _weights(self) -> dict[str, Any]:
        held = self._averages.module.state_dict()
        if not self._state.is_fsdp1:
            own = model_state_dict(self._state.module, "sharded")
            own = {name: value for name, value in own.items() if not is_extra(name)}
            if all(name in held and _is_box(value) for name, value in own.items()):
                return {name: _with_values(value, held[name]) for name, value in own.items()}
        with exchanged(self._view, self._averages.module):
            shown = model_state_dict(self._state.module, "sharded")
            return {name: _copy(value) for name, value in shown.items() if not is_extra(name)}

    def _extra_states(self) -> dict[str, Any]:
        """Return extra states of the model's modules, which no average has. Collective: every rank."""
        model = self._state.module
        if all(type(module).get_extra_state is nn.Module.get_extra_state for module in model.modules()):
            return {}
        return {name: value for name, value in model_state_dict(model, "sharded").items() if is_extra(name)}

    def _check_hidden(self, call: str) -> None:
        if self._is_shown:
            raise ShardStateError(
                f"{call} was called inside average_parameters(), where the model holds the averages, and AveragedModel "
                "the trained weights. Call it after the block."
            )


def check_averages_of(averaged: Any, model: nn.Module) -> None:
    """Check that averages belong to a sharded model. Not collective.

    Raises:
        ConfigError: They are of another model, or not an `AveragedModel`.
    """
    if not isinstance(averaged, AveragedModel):
        raise ConfigError(f"averaged is a {type(averaged).__name__}. Pass an mmfsdp.AveragedModel of the model.")
    if not averaged.is_of(model):
        raise ConfigError("averaged is an AveragedModel of another model. Pass the one that was made from this model.")


def compare_averages(averaged: AveragedModel | nn.Module, state_dict: Mapping[str, Any]) -> LoadReport:
    """Return how the parameters of a state, and averages or a sharded model that has them, differ. Not collective.

    Raises:
        StateDictError: It is not the state of an `AveragedModel`.
    """
    if isinstance(averaged, AveragedModel):
        _parts(state_dict)
        state, prefix = averaged._state, WRAPPER_PREFIX
    else:
        state, prefix = find_sharded_model(averaged), ""
    wanted = {
        f"{prefix}{name}": param.shape for param in state.plan.all_params() for name in (param.fqn, *param.aliases)
    }
    return compare_shapes(wanted, {name: tuple(value.shape) for name, value in state_dict.items() if name in wanted})


def _parts(state_dict: Any) -> tuple[Any, dict[str, Any]]:
    """Return the number of updates and the averages by the model's own names."""
    found = state_dict if isinstance(state_dict, Mapping) else {}
    weights = {name.removeprefix(WRAPPER_PREFIX): found[name] for name in found if str(name).startswith(WRAPPER_PREFIX)}
    if _COUNT not in found or not weights:
        held = name_list(sorted(map(str, found))[:5]) or f"a {type(state_dict).__name__}"
        raise StateDictError(
            f"The state of an AveragedModel has {_COUNT!r}, and the averages under names that begin with "
            f"{WRAPPER_PREFIX!r}; given: {held}. To begin with other weights, load them into the model before the "
            "first update_parameters()."
        )
    return found[_COUNT], weights


def _check_decay(decay: Any, model: nn.Module) -> None:
    rate = decay(_LATE) if callable(decay) else decay
    _check_rate(rate)
    for name, param in model.named_parameters():
        if not param.requires_grad or param.dtype not in (torch.bfloat16, torch.float16):
            continue
        resolution = torch.finfo(param.dtype).eps
        if 0 < 1 - rate < resolution:
            raise ConfigError(
                f"With decay {rate} an update moves an average by less than {param.dtype} resolves, in which {name!r} "
                "is stored: the average would stay where it began. Shard with precision={'storage_dtype': 'float32'} "
                f"beside your settings, or choose a decay below {1 - resolution:.3f}."
            )


def _check_rate(rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(
            f"decay must be a number from 0 to 1, the share of the averages that an update keeps, or a function that "
            f"returns one; got {rate!r}. Usual values are 0.99 to 0.9999."
        )


def _is_box(value: Any) -> bool:
    return not isinstance(value, DTensor) or all(type(each) in (Shard, Replicate) for each in value.placements)


def _with_values(like: Any, average: torch.Tensor) -> torch.Tensor:
    """Return an average as a tensor that is sharded as ``like``."""
    if not isinstance(like, DTensor):
        return average
    return DTensor.from_local(
        average, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
