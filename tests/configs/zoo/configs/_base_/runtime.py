default_scope = "zoo"
train_dataloader = dict(batch_size=2)
default_hooks = dict(timer=dict(type="IterTimerHook"), checkpoint=dict(type="CheckpointHook", interval=1))
custom_hooks = [dict(type="SwitchRecipeHook")]
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
