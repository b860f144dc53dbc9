custom_hooks = [
    dict(type='KeepLosses'),
    dict(momentum=0.2, type='EMAHook'),
]
custom_imports = dict(
    allow_failed_imports=False, imports=[
        'project',
    ])
default_hooks = dict(
    checkpoint=dict(interval=1, type='CheckpointHook'),
    logger=dict(interval=1, type='LoggerHook'))
experiment_name = 'tiny'
model = dict(type='TinyModel')
optim_wrapper = dict(
    clip_grad=dict(max_norm=0.5), optimizer=dict(lr=0.05, type='AdamW'))
param_scheduler = [
    dict(by_epoch=False, end=4, start_factor=0.5, type='LinearLR'),
    dict(by_epoch=True, milestones=[
        2,
    ], type='MultiStepLR'),
]
randomness = dict(seed=5)
train_cfg = dict(by_epoch=True, max_epochs=3)
train_dataloader = dict(
    batch_size=8,
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='TinyData'),
    num_workers=0,
    sampler=dict(shuffle=False, type='DefaultSampler'))
work_dir = 'work_dirs/tiny'
