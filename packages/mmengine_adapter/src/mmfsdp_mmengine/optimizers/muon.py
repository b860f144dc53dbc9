"""`MuonConstructor`: builds Muon with AdamW from a config, with MMEngine's `paramwise_cfg`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from mmfsdp import plan
from mmfsdp.errors import ConfigError
from mmfsdp.optimizers import MuonWithAdamW
from mmfsdp_mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, replace_stock

__all__ = ["MuonConstructor"]

NAME = MuonWithAdamW.__name__


class MuonConstructor(DefaultOptimWrapperConstructor):
    """Builds an optimizer wrapper in which Muon updates matrices of hidden layers, and AdamW all else.

    It sees the model before it is sharded. ``FSDPStrategy`` then gives the optimizer the sharded parameters.

    Args:
        optim_wrapper_cfg: The config of the wrapper. Its ``optimizer`` has the settings of mmfsdp's section
            ``optimizer``, and may have ``type='MuonWithAdamW'``. Not changed.
        paramwise_cfg: As MMEngine's default constructor takes it. ``lr_mult``, ``decay_mult`` and the like multiply the
            rates of the optimizer that updates a parameter. Other custom settings replace its group's.

    Raises:
        ConfigError: ``optimizer`` has another type, or a custom key sets a rate instead of a multiplier.
    """

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: dict[str, Any] | None = None) -> None:
        given = dict(optim_wrapper_cfg.get("optimizer") or {})
        if (kind := given.pop("type", NAME)) != NAME:
            raise ConfigError(
                f"MuonConstructor builds {NAME}, but optim_wrapper.optimizer has type={kind!r}. Write "
                f"optimizer=dict(type={NAME!r}, lr=..., adamw=dict(lr=...)), or drop constructor='MuonConstructor'.",
                config="optim_wrapper.optimizer.type",
            )
        for key, settings in ((paramwise_cfg or {}).get("custom_keys") or {}).items():
            for rate, multiplier in (("lr", "lr_mult"), ("weight_decay", "decay_mult")):
                if rate in settings:
                    raise ConfigError(
                        f"paramwise_cfg sets {rate}={settings[rate]!r} for {key!r}, whose parameters Muon and AdamW "
                        f"may update, with a rate each. Write {multiplier}=... instead.",
                        config=f"optim_wrapper.paramwise_cfg.custom_keys.{key}",
                    )
        self._settings = given
        # MMEngine's rules applied to rates of 1 are the multipliers of each parameter.
        super().__init__({**optim_wrapper_cfg, "optimizer": {"lr": 1.0, "weight_decay": 1.0}}, paramwise_cfg)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Return the optimizer wrapper of a model that is not sharded yet.

        Raises:
            ConfigError: A setting of the optimizer is unknown or out of range.
            PolicyError: A pattern matches no parameter.
            PlanError: A pattern gives Muon a parameter that it cannot or should not update.
        """
        model = getattr(model, "module", model)
        rules: dict[int, Mapping[str, Any]] = {}
        found: list[dict[str, Any]] = []
        self.add_params(found, model)
        for rule in found:
            rules.setdefault(id(rule["params"][0]), rule)  # tied parameters are found twice
        chosen = plan(model, {"optimizer": self._settings}, 1).optimizer
        assert chosen is not None  # the config has the section
        params = dict(model.named_parameters())
        groups: dict[str, dict[str, Any]] = {}
        for group in chosen.groups:
            for fqn in group.fqns:
                settings = _with_rule({**group.settings, "optimizer": group.optimizer}, rules[id(params[fqn])])
                groups.setdefault(repr(settings), {**settings, "params": []})["params"].append(params[fqn])
        names = {id(param): fqn for fqn, param in params.items()}
        optimizer = MuonWithAdamW([*groups.values()], names=names, bucket_bytes=chosen.bucket_bytes)
        config = {"type": "OptimWrapper", **self.optim_wrapper_cfg}
        wrapper: OptimWrapper = OPTIM_WRAPPERS.build(config, default_args={"optimizer": optimizer})
        return wrapper


def _with_rule(settings: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a param group, changed by what MMEngine's rules say about a parameter."""
    own = {key: value for key, value in rule.items() if key not in ("params", "lr_mult", "decay_mult")}
    rates = {key: settings[key] * own.pop(key, 1.0) for key in ("lr", "weight_decay")}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return {**known, **own, **rates}


replace_stock(OPTIM_WRAPPER_CONSTRUCTORS, MuonConstructor)
