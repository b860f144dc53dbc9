_base_ = ["_base_/runtime.py"]

model = dict(
    type="Detr",
    backbone=dict(type="ResNet", width=32),
    encoder=dict(width=16, depth=3),
    decoder=dict(width=16, depth=3),
)
