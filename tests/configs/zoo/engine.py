"""A hook and an optimizer constructor that only scope ``zoo`` has."""

from mmengine.hooks import Hook
from mmengine.optim import DefaultOptimWrapperConstructor

from zoo.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS


@HOOKS.register_module()
class SwitchRecipeHook(Hook):
    """Does nothing."""


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DecayConstructor(DefaultOptimWrapperConstructor):
    """Reads its settings as attributes, as mmdet's constructors do."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.depth = optim_wrapper_cfg.optimizer.lr and paramwise_cfg.num_layers
        super().__init__(optim_wrapper_cfg, None)
