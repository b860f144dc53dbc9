"""Changes the inputs of a model by about one unit in the last place, to see what rounding does to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

__all__ = ["perturb_inputs"]


@contextmanager
def perturb_inputs(model: nn.Module, seed: int) -> Iterator[None]:
    """Multiply the inputs of a model by numbers around 1; of models that take only integers, the outputs of embeddings.

    The numbers do not come from torch's global generators, whose state stays as it is.

    Args:
        model: The model, without DDP around it.
        seed: Another seed gives other numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        dtype = torch.get_autocast_dtype(value.device.type) if _autocasts(value) else value.dtype
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
        return value * (1 + signs.to(torch.float64) * torch.finfo(dtype).eps).to(value.dtype)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(change, (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output)

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_hook(after).remove)
        yield


def _autocasts(value: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(value.device.type)
