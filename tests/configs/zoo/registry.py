"""Registries of scope ``zoo``, which import its modules when a name is looked up."""

from mmengine.registry import HOOKS as ROOT_HOOKS
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as ROOT_CONSTRUCTORS
from mmengine.registry import Registry

MODELS = Registry("model", parent=ROOT_MODELS, scope="zoo", locations=["zoo.models"])
HOOKS = Registry("hook", parent=ROOT_HOOKS, scope="zoo", locations=["zoo.engine"])
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    "optim_wrapper_constructor", parent=ROOT_CONSTRUCTORS, scope="zoo", locations=["zoo.engine"]
)
