"""Small models with the traits of real families, named as configs name them, for tests of the diagnosis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from mmengine.logging import print_log
from mmengine.model import BaseModel
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapperDict
from mmengine.registry import FUNCTIONS, HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS

import mmfsdp_mmengine

__all__ = ["Block", "Transformer"]


class Block(nn.Module):
    def __init__(self, width: int, lora: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2)
        self.mlp = nn.Linear(width, width)
        if lora:
            self.requires_grad_(False)
            self.lora_a, self.lora_b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@MODELS.register_module(force=True)
class Transformer(BaseModel):
    """DeiT, MAE's encoder, LoRA or GPT-2, by its arguments."""

    def __init__(self, depth: int = 2, width: int = 8, lora: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, lora) for _ in range(depth))
        self.embed = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Any, mode: str = "tensor") -> Any:
        raise NotImplementedError


@MODELS.register_module(force=True)
class Pyramid(BaseModel):
    """Stages with a module between them, as Swin, or convolutions with batch norm, as a ResNet."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Block(8), Block(8)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)

    def forward(self, inputs: Any, mode: str = "tensor") -> Any:
        raise NotImplementedError


@MODELS.register_module(force=True)
class Noisy(Transformer):
    """Prints and logs while it is built."""

    def __init__(self) -> None:
        super().__init__()
        print("built")
        print_log("built", "current")


@MODELS.register_module(force=True)
class Gan(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(8), Block(8))
        self.discriminator = nn.Sequential(Block(8), Block(8))

    def forward(self, inputs: Any, mode: str = "tensor") -> Any:
        raise NotImplementedError

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        raise NotImplementedError


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class LayerDecay(DefaultOptimWrapperConstructor):
    """A group per parameter."""

    def add_params(self, params: list[Any], module: nn.Module, **_: Any) -> None:
        for name, param in module.named_parameters():
            decay = self.paramwise_cfg["layer_decay_rate"] ** name.count(".")
            params.append({"params": [param], "lr": self.base_lr * decay})


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class PerNetwork:
    """An optimizer for each submodule that the config names."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.config = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        built = {
            name: DefaultOptimWrapperConstructor({key: config[key] for key in config if key != "of"})(
                getattr(model, config.get("of", name))
            )
            for name, config in self.config.items()
        }
        return OptimWrapperDict(**built)


@FUNCTIONS.register_module(force=True)
def is_block(module: nn.Module) -> bool:
    """A check_fn."""
    return isinstance(module, Block)


@HOOKS.register_module(force=True)
class OldAverages(mmfsdp_mmengine.EMAHook.__mro__[1]):
    """Derived from MMEngine's own hook, as where its module is imported before the package."""
