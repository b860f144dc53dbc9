"""An optimizer with compressed state, written with torch alone, and one that keeps what nothing can bring back."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

BLOCK = 8


class Codes(torch.Tensor):
    """Floats as codes of 8 bits with a scale for each block of elements, by torch's protocol for wrappers."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    codes: torch.Tensor
    scale: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Codes:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def zeros(cls, shape: torch.Size) -> Codes:
        return cls(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape.numel() // BLOCK))

    def values(self) -> torch.Tensor:
        return (self.codes.reshape(-1, BLOCK) * self.scale[:, None]).reshape(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default and isinstance(args[0], Codes):
            values = args[1].values() if isinstance(args[1], Codes) else args[1]
            blocks = values.reshape(-1, BLOCK)
            args[0].scale.copy_(blocks.abs().amax(1) / 127)
            args[0].codes.copy_((blocks / args[0].scale.clip(1e-30)[:, None]).round().reshape(values.shape))
            return args[0]
        if func in (aten.detach.default, aten.view.default, aten.alias.default):
            return cls(func(args[0].codes, *args[1:]), args[0].scale)
        values = tree_map(lambda item: item.values() if isinstance(item, Codes) else item, (args, kwargs or {}))
        return func(*values[0], **values[1])


class CompressedMomentum(torch.optim.Optimizer):
    """Momentum, compressed where a rank holds whole blocks and enough of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert isinstance(group["lr"], torch.Tensor)
            for param in group["params"]:
                if param.grad is None:
                    continue
                local, grad = _local(param), _local(param.grad)
                state = self.state[param]
                if not state:
                    enough = local.numel() >= 64 and local.numel() % BLOCK == 0
                    made = Codes.zeros(local.shape) if enough else torch.zeros_like(local)
                    state["momentum"] = _like(made, param)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                momentum = _local(state["momentum"])
                values = momentum.values() if isinstance(momentum, Codes) else momentum
                momentum.copy_(values * 0.9 + grad)
                local.sub_(momentum.values() if isinstance(momentum, Codes) else momentum, alpha=group["lr"].item())


class Projector:
    """As GaLore's: an object that holds a tensor."""

    def __init__(self) -> None:
        self.basis = torch.zeros(2, 2)


class Keeping(torch.optim.SGD):
    """SGD that keeps something of its own for its last parameter."""

    kept: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        param = self.param_groups[-1]["params"][-1]
        self.state[param]["kept"] = self.kept(param)


def _local(tensor: torch.Tensor) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
