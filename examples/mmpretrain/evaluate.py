"""Loads exported weights with mmpretrain alone, and classifies an image."""

import torch
from mmpretrain import get_model, inference_model

model = get_model("deit-small_4xb256_in1k")
print(model.load_state_dict(torch.load("deit_small.pth")["state_dict"]))
print(sorted(inference_model(model, "data/imagenet/val/0.png")))
