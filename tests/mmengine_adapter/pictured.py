"""Transforms that read an image file and its labels, and a model for them, as OpenMMLab's packages have them."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS, TRANSFORMS
from mmengine.structures import BaseDataElement
from torch import nn

__all__ = ["Crop", "Load", "Pack", "Pictured"]


@TRANSFORMS.register_module(force=True)
class Load:
    """Reads the image and the map of classes."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        assert results["height"], results["width"] == cv2.imread(results["img_path"]).shape[:2]
        results["img"] = cv2.imread(results["img_path"])
        results["classes"] = cv2.imread(results["seg_map_path"], cv2.IMREAD_UNCHANGED)
        return results


@TRANSFORMS.register_module(force=True)
class Crop:
    """Crops to one of several heights, or drops the sample."""

    def __init__(self, heights: list[int], width: int) -> None:
        self.heights, self.width = heights, width

    def __call__(self, results: dict[str, Any]) -> dict[str, Any] | None:
        height = int(np.random.choice(self.heights))
        for name in ("img", "classes"):
            results[name] = results[name][:height, : self.width]
        return results if height else None


@TRANSFORMS.register_module(force=True)
class Pack:
    """Makes tensors of them."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        image = torch.from_numpy(results["img"].transpose(2, 0, 1).copy())
        labels = BaseDataElement(classes=torch.from_numpy(results["classes"].astype(np.int64)))
        return {"inputs": image, "data_samples": labels}


@MODELS.register_module(force=True)
class Pictured(BaseModel):
    """Predicts the class of each pixel."""

    def __init__(self, own_step: bool = False, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
        if own_step:
            self.train_step = lambda data, optim_wrapper: {}

    def compute(self, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        height, width = classes.shape[1:]
        logits = self.head(self.norm(self.conv(inputs)).relu())[..., :height, :width]
        return nn.functional.cross_entropy(logits.float(), classes)

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        assert mode == "loss"
        classes = torch.stack([sample.classes for sample in data_samples])
        assert (classes == 255).sum().item() == 0  # labels have values
        return {"loss_pixels": self.compute(inputs, classes)}
