"""Models of transformers as MMEngine models, built from configuration classes: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor

__all__ = ["CausalLM", "Classifier", "Detector", "MaskedAutoencoder", "MaskedLM", "Pretrained", "Segmenter"]

transformers.logging.set_verbosity_error()


class Pretrained(BaseModel):
    """A model of transformers.

    Args:
        architecture: Its class's name.
        config: Fields of its configuration class.
        backbone: Fields of the ResNetConfig of its backbone, for detectors.
        norm_eval: Whether batch norm keeps its running statistics while training, as detection configs say.
        frozen: Beginnings of the names of parameters that are not trained.
    """

    def __init__(
        self,
        architecture: str,
        config: dict[str, Any],
        backbone: dict[str, Any] | None = None,
        norm_eval: bool = False,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        network = getattr(transformers, architecture)
        extra = {} if backbone is None else {"backbone_config": transformers.ResNetConfig(**backbone)}
        self.model = network(network.config_class(**config, **extra))
        self.norm_eval = norm_eval
        for name, param in self.model.named_parameters():
            if name.startswith(tuple(frozen)):
                param.requires_grad = False

    def train(self, mode: bool = True) -> Pretrained:
        super().train(mode)
        for module in self.modules():
            if self.norm_eval and isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def forward(self, mode: str = "tensor", **batch: Tensor) -> Any:
        if mode == "loss":
            return {"loss": self.losses(self.compute(**batch), **batch).mean()}
        output = self.compute(**batch)
        if mode == "predict":
            right = self.right(output, **batch)
            losses = self.losses(output, **batch)
            return [{"right": hit, "loss": loss} for hit, loss in zip(right, losses, strict=True)]
        return output.logits

    def compute(self, **batch: Tensor) -> Any:
        """Return the output of transformers' model."""
        raise NotImplementedError

    def losses(self, output: Any, **batch: Tensor) -> Tensor:
        """Return the loss of each sample."""
        raise NotImplementedError

    def right(self, output: Any, **batch: Tensor) -> Tensor:
        """Return the share of right predictions of each sample."""
        raise NotImplementedError


@MODELS.register_module(force=True)
class Classifier(Pretrained):
    """Image classification: DeiT, Swin, ConvNeXt, ResNet."""

    def compute(self, inputs: Tensor, **_: Tensor) -> Any:
        return self.model(pixel_values=inputs)

    def losses(self, output: Any, labels: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, labels, reduction="none")

    def right(self, output: Any, labels: Tensor, **_: Tensor) -> Tensor:
        return (output.logits.argmax(1) == labels).float()


@MODELS.register_module(force=True)
class Segmenter(Pretrained):
    """Semantic segmentation: SegFormer. Logits are resized to the masks."""

    def compute(self, inputs: Tensor, **_: Tensor) -> Any:
        return self.model(pixel_values=inputs)

    def losses(self, output: Any, masks: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self._resized(output, masks), masks, reduction="none").mean((1, 2))

    def right(self, output: Any, masks: Tensor, **_: Tensor) -> Tensor:
        return (self._resized(output, masks).argmax(1) == masks).float().mean((1, 2))

    def _resized(self, output: Any, masks: Tensor) -> Tensor:
        return F.interpolate(output.logits, masks.shape[-2:], mode="bilinear", align_corners=False)


@MODELS.register_module(force=True)
class MaskedAutoencoder(Pretrained):
    """MAE. What is masked comes with the data, so that it does not depend on ranks' random states."""

    def compute(self, inputs: Tensor, noise: Tensor, **_: Tensor) -> Any:
        return self.model(pixel_values=inputs, noise=noise)

    def losses(self, output: Any, inputs: Tensor, **_: Tensor) -> Tensor:
        errors = (output.logits - self.model.patchify(inputs)).square().mean(2)
        return (errors * output.mask).sum(1) / output.mask.sum(1)

    def right(self, output: Any, inputs: Tensor, **_: Tensor) -> Tensor:
        return ((output.logits - self.model.patchify(inputs)).abs() < 0.5).float().mean((1, 2))


@MODELS.register_module(force=True)
class Detector(Pretrained):
    """DETR and its kin: each query's box is matched to one of the image's, and the rest to none."""

    def compute(self, inputs: Tensor, boxes: Tensor, labels: Tensor) -> Any:
        targets = [{"boxes": box, "class_labels": label} for box, label in zip(boxes, labels, strict=True)]
        return self.model(pixel_values=inputs, labels=targets)

    def losses(self, output: Any, boxes: Tensor, **_: Tensor) -> Tensor:
        # Every image has as many boxes, so the batch's loss is the mean over its images.
        return output.loss.expand(len(boxes))

    def right(self, output: Any, labels: Tensor, **_: Tensor) -> Tensor:
        best = output.logits[..., :-1].amax(1).argmax(1)
        return (best[:, None] == labels).any(1).float()


@MODELS.register_module(force=True)
class CausalLM(Pretrained):
    """Next word: GPT-2, Llama."""

    def compute(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=False)

    def losses(self, output: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    def right(self, output: Any, tokens: Tensor) -> Tensor:
        return (output.logits[:, :-1].argmax(2) == tokens[:, 1:]).float().mean(1)


@MODELS.register_module(force=True)
class MaskedLM(Pretrained):
    """Masked words: BERT. As many are masked in every sample."""

    def compute(self, tokens: Tensor, masked: Tensor) -> Any:
        return self.model(input_ids=torch.where(masked, 0, tokens))

    def losses(self, output: Any, tokens: Tensor, masked: Tensor) -> Tensor:
        errors = F.cross_entropy(output.logits.transpose(1, 2), tokens, reduction="none")
        return (errors * masked).sum(1) / masked.sum(1)

    def right(self, output: Any, tokens: Tensor, masked: Tensor) -> Tensor:
        return ((output.logits.argmax(2) == tokens) * masked).sum(1) / masked.sum(1)
