_base_ = ["_base_/runtime.py"]

model = dict(type="zoo.Classifier", backbone=dict(type="ResNet"), head=300)
sync_bn = "torch"
