"""The registries of scope ``mmfsdp_mmengine``, and functions that register our classes in place of the stock ones."""

from __future__ import annotations

from typing import Any

import mmengine._strategy
import mmengine.hooks
import mmengine.model.wrappers
from mmengine.registry import FUNCTIONS as ROOT_FUNCTIONS
from mmengine.registry import HOOKS as ROOT_HOOKS
from mmengine.registry import MODEL_WRAPPERS as ROOT_MODEL_WRAPPERS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as ROOT_OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import OPTIM_WRAPPERS as ROOT_OPTIM_WRAPPERS
from mmengine.registry import STRATEGIES as ROOT_STRATEGIES
from mmengine.registry import Registry
from torch.distributed.fsdp import wrap

__all__ = [
    "FSDP_WRAP_POLICIES",
    "FUNCTIONS",
    "HOOKS",
    "MODEL_WRAPPERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "STRATEGIES",
    "ours_for",
    "register",
    "replace_stock",
]

SCOPE = "mmfsdp_mmengine"

FUNCTIONS = Registry("function", parent=ROOT_FUNCTIONS, scope=SCOPE, locations=[SCOPE])
"""Functions of this package, found under the scope ``mmfsdp_mmengine``."""
HOOKS = Registry("hook", parent=ROOT_HOOKS, scope=SCOPE, locations=[SCOPE])
"""Hooks of this package."""
MODEL_WRAPPERS = Registry("model wrapper", parent=ROOT_MODEL_WRAPPERS, scope=SCOPE, locations=[SCOPE])
"""Model wrappers of this package."""
OPTIM_WRAPPERS = Registry("optimizer wrapper", parent=ROOT_OPTIM_WRAPPERS, scope=SCOPE, locations=[SCOPE])
"""Optimizer wrappers of this package."""
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    "optimizer wrapper constructor", parent=ROOT_OPTIM_WRAPPER_CONSTRUCTORS, scope=SCOPE, locations=[SCOPE]
)
"""Constructors of optimizer wrappers of this package."""
STRATEGIES = Registry("strategy", parent=ROOT_STRATEGIES, scope=SCOPE, locations=[SCOPE])
"""Strategies of this package."""

FSDP_WRAP_POLICIES = Registry("fsdp wrap policy", scope=SCOPE)
"""Wrapping policies by name, including torch's own; policies in MMEngine's FUNCTIONS are found too."""

for _policy in (
    wrap.size_based_auto_wrap_policy,
    wrap.transformer_auto_wrap_policy,
    wrap.always_wrap_policy,
    wrap.lambda_auto_wrap_policy,
    wrap.ModuleWrapPolicy,
    wrap.CustomPolicy,
):
    FSDP_WRAP_POLICIES.register_module(module=_policy)
FSDP_WRAP_POLICIES.register_module(name="or_policy", module=wrap._or_policy)
# Its name in torch 1.11, which MMEngine 0.4 to 0.8 used.
FSDP_WRAP_POLICIES.register_module(name="default_auto_wrap_policy", module=wrap.size_based_auto_wrap_policy)


def register(registry: Registry, cls: type) -> None:
    """Register ``cls`` under its name in a registry of this package; doing so twice changes nothing."""
    registry.register_module(module=cls, force=True)


_replaced: dict[type, type] = {}


def ours_for(value: Any) -> Any:
    """Return our class for the MMEngine class that it replaces; any other value as it is."""
    return _replaced.get(value, value) if isinstance(value, type) else value


def replace_stock(registry: Registry, cls: type) -> None:
    """Register ``cls`` in a registry of this package, and in its parent in place of MMEngine's class of that name.

    ``type='FSDPStrategy'`` and ``type='mmengine.FSDPStrategy'`` then both refer to our class, and so does MMEngine's
    class as an object: see `ours_for`.
    """
    # MMEngine registers its classes when their modules are imported: import them before we replace the classes.
    assert mmengine._strategy.FSDPStrategy
    assert mmengine.hooks.EMAHook
    assert mmengine.model.wrappers.MMDistributedDataParallel
    register(registry, cls)
    stock = registry.parent.module_dict.get(cls.__name__)
    if stock is not None:
        _replaced[stock] = cls
    registry.parent.register_module(module=cls, force=True)
