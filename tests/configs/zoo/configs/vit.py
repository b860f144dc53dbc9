_base_ = ["_base_/runtime.py"]

model = dict(type="Classifier", backbone=dict(type="Vit", pretrained=None))
optim_wrapper = dict(constructor="DecayConstructor", paramwise_cfg=dict(num_layers=3))
