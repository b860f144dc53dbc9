from mmengine.hooks import IterTimerHook
from zoo.engine import SwitchRecipeHook

default_scope = "zoo"
train_dataloader = dict(batch_size=2)
default_hooks = dict(timer=dict(type=IterTimerHook))
custom_hooks = [dict(type=SwitchRecipeHook)]
