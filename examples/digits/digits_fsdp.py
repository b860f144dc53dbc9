# An ordinary MMEngine config; the first import below is all that mmfsdp adds to it.
custom_imports = dict(imports=["mmfsdp_mmengine", "digits"], allow_failed_imports=False)

model = dict(type="DigitsClassifier", width=64, depth=4, heads=4)

strategy = dict(
    type="FSDPStrategy",
    model_wrapper=dict(
        type="MMFullyShardedDataParallel",
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy=dict(
            type="torch.distributed.fsdp.wrap.transformer_auto_wrap_policy", transformer_layer_cls=["Block"]
        ),
    ),
    activation_checkpointing=None,
    state_dict_cfg="local",
)

global_batch = 64
ranks = 2
train_dataloader = dict(
    batch_size=global_batch // ranks,
    num_workers=0,
    drop_last=True,
    collate_fn=dict(type="default_collate"),
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Digits", train=True),
)
val_dataloader = dict(
    batch_size=90,
    num_workers=0,
    collate_fn=dict(type="default_collate"),
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="Digits", train=False),
)
val_evaluator = dict(type="Accuracy")

epochs = 30
train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=5)
val_cfg = dict()
optim_wrapper = dict(
    type="OptimWrapper", optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.1), clip_grad=dict(max_norm=1.0)
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=True, begin=0, end=3),
    dict(type="CosineAnnealingLR", T_max=epochs - 3, by_epoch=True, begin=3, end=epochs),
]

default_scope = "mmengine"
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=22), checkpoint=dict(type="CheckpointHook", interval=5, max_keep_ckpts=2)
)
custom_hooks = [dict(type="StepLosses")]
env_cfg = dict(dist_cfg=dict(backend="gloo"))
randomness = dict(seed=0)
work_dir = "work_dirs/digits_fsdp"
