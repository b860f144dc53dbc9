from mmengine.config import read_base
from mmengine.optim import OptimWrapper
from torch.optim import SGD
from zoo.models import Classifier, Swin

with read_base():
    from ._base_.python_runtime import *

model = dict(type=Classifier, backbone=dict(type=Swin, width=16))
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.1))
