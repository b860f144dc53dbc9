"""Keeps the results of chosen operators until backward, on their device or in CPU memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mmfsdp.sharding.activation.kept_operators import resolve_operators

__all__ = ["offloading_contexts", "pins_memory", "selective_contexts", "traced_contexts"]


def selective_contexts(names: tuple[str, ...]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and recomputation that keep the results of the named operators."""
    operators = resolve_operators(names)
    forward, recomputation = traced_contexts(names)
    return _Listed(forward, operators), _Listed(recomputation, operators)


def traced_contexts(names: tuple[str, ...]) -> Any:
    """Return contexts like `selective_contexts`, which torch's compiler understands."""
    operators = resolve_operators(names)

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def offloading_contexts(names: tuple[str, ...]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts like `selective_contexts`, which keep the results in CPU memory."""
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _KeepOnCpu(resolve_operators(names), kept), _TakeFromCpu(resolve_operators(names), kept)


def pins_memory() -> bool:
    """Return whether pinning CPU memory pays, because there is an accelerator."""
    return torch.accelerator.is_available()


class _Listed(TorchDispatchMode):
    """Shows the given operators to a context of torch, and no others.

    torch 2.10 and later count every operator, and raise if the recomputation runs another one than forward. A shard
    unit within the region does: it marks more for the profiler, and may gather units ahead at other points.
    """

    def __init__(self, context: TorchDispatchMode, operators: frozenset[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.context, self.operators = context, operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say, as torch's own contexts do, that compiled functions within the region stay compiled."""
        return True

    def __enter__(self) -> Any:
        with self.context:  # it begins to count anew
            pass
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operators:
            return self.context.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _KeepOnCpu(TorchDispatchMode):
    """Copies the results of the given operators to CPU memory while the forward runs.

    torch's own policy MUST_CPU_OFFLOAD is honoured by its compiler only; in eager mode it means "recompute".
    """

    def __init__(self, operators: frozenset[Any], kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.kept = operators, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.operators:
            self.kept[func].append(tree_map_only(torch.Tensor, _keep, result))
        return result


class _TakeFromCpu(TorchDispatchMode):
    """Returns the kept results in order while the region is recomputed."""

    def __init__(self, operators: frozenset[Any], kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.kept = operators, kept
        self.taken: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self.taken = defaultdict(int)  # each backward recomputes once, from the start
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operators:
            return func(*args, **(kwargs or {}))
        index = self.taken[func]
        self.taken[func] += 1
        if index >= len(self.kept[func]):
            raise RuntimeError(
                f"{func} runs more often in the recomputation than it ran in forward: the forward depends on something "
                "that changed in between."
            )
        return tree_map_only(_OnCpu, _OnCpu.back, self.kept[func][index])


class _OnCpu:
    def __init__(self, tensor: torch.Tensor) -> None:
        # Copy even from the CPU to the CPU, because later code may change the result in place.
        self.device = tensor.device
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=pins_memory() and tensor.device.type != "cpu")
        self.copy.copy_(tensor, non_blocking=self.copy.is_pinned())

    def back(self) -> torch.Tensor:
        return self.copy.to(self.device, non_blocking=self.copy.is_pinned(), copy=True)


def _keep(tensor: torch.Tensor) -> Any:
    # Subclasses such as DTensor have their own rules for moving, so they stay where they are.
    return _OnCpu(tensor) if type(tensor) is torch.Tensor else tensor.detach()
