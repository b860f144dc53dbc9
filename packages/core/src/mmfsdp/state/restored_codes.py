"""Restores weights that a state dict holds as codes with scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.codes import block_of, needless_parts
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import Box
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.stored_codes import REMEDY, codes_for_numbers, names_held
from mmfsdp.state.lazy_tensors import LazyTensor, TensorSource, Wanted, whole_box

__all__ = ["as_numbers"]


def as_numbers(state_dict: Mapping[str, Any], state: ShardedModel) -> Mapping[str, Any]:
    """Return a state dict whose codes are restored, as lazy tensors, where the model has numbers. Not collective.

    Codes stay where the model has codes of the same dtype, or their scales.

    Args:
        state_dict: Tensors under the unsharded model's keys. Not changed.
        state: The model's state.

    Raises:
        StateDictError: The model has numbers where the state dict has codes that cannot be restored.
    """
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor | LazyTensor)}
    found = codes_for_numbers(tensors, state)
    for name in found:
        _check(name, tensors[name], tensors[found[name]])
    if not found:
        return state_dict
    restored = _restored(tensors, found)
    gone = needless_parts(tensors, found) - {*names_held(state)}
    return {name: restored.get(id(value), value) for name, value in state_dict.items() if name not in gone}


def _check(name: str, codes: Any, scale: Any) -> None:
    if isinstance(codes, DTensor) or isinstance(scale, DTensor):
        raise StateDictError(
            f"{name!r} is a shard of codes with scales, and only whole tensors are restored. Load the checkpoint's "
            "files with load_pretrained(), or convert it with quantize='none' first."
        )
    if block_of(codes, scale) is None:
        raise StateDictError(
            f"{name!r} of shape {[*codes.shape]} has {_name(scale.dtype)} scales of shape {[*scale.shape]}. Expected "
            f"one, one for each row, or one for each block, such as 128 x 128. {REMEDY}"
        )


def _restored(tensors: Mapping[str, Any], found: Mapping[str, str]) -> dict[int, LazyTensor]:
    """Return lazy tensors of numbers by the ids of their codes."""
    memory = _Memory(tensors)
    sources: dict[str, _Restoring] = {}
    restored: dict[int, LazyTensor] = {}
    for name, scale_name in found.items():
        codes, scale = (
            value if isinstance(value, LazyTensor) else LazyTensor(own, _name(value.dtype), tuple(value.shape), memory)
            for own, value in ((name, tensors[name]), (scale_name, tensors[scale_name]))
        )
        source = sources.setdefault(codes.source.key, _Restoring(codes.source))
        source.codes[name] = _Codes(codes, scale, block_of(codes, scale) or ())
        restored[id(tensors[name])] = LazyTensor(name, "float32", tuple(codes.shape), source)
    return restored


@dataclass(frozen=True, slots=True)
class _Codes:
    """A weight: its codes, its scales, and the sizes of the blocks that share one."""

    codes: LazyTensor
    scale: LazyTensor
    block: tuple[int, ...]

    def read(self, box: Box) -> torch.Tensor:
        """Return a box of the weight as float32."""
        numbers = self.codes.read(box).to(torch.float32)
        scales = self.scale.read().to(torch.float32)
        shape = (1,) * numbers.dim() if scales.numel() == 1 else tuple(scales.shape)
        scales = scales.reshape(*shape, *(1,) * (numbers.dim() - len(shape)))
        for dim, side in enumerate(self.block):
            if scales.shape[dim] > 1:
                index = (box.offsets[dim] + torch.arange(box.sizes[dim])) // side
                scales = scales.index_select(dim, index)
        return numbers.mul_(scales)


class _Restoring:
    """A `TensorSource` of restored weights: asks the source of their codes for codes and scales.

    Args:
        inner: The source of the codes.
    """

    def __init__(self, inner: TensorSource) -> None:
        self.inner, self.key, self.is_shared = inner, f"{inner.key}, restored", inner.is_shared
        self.codes: dict[str, _Codes] = {}

    @property
    def is_local(self) -> bool:
        return self.inner.is_local

    @property
    def num_records(self) -> int | None:
        return self.inner.num_records

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        return self.inner.read_in_part(self._parts(wanted))

    def check_own(self, wanted: Sequence[Wanted], flags: Sequence[int], rank: int, count: int) -> None:
        self.inner.check_own(self._parts(wanted), flags, rank, count)

    def find(self, requests: Sequence[Sequence[Wanted]]) -> Sequence[Any]:
        return self.inner.find([self._parts(wanted) for wanted in requests])

    def learn(self, wanted: Sequence[Wanted], found: Any) -> None:
        self.inner.learn(self._parts(wanted), found)

    def fill(self, name: str, box: Bounds, target: memoryview) -> None:
        _copy(self.codes[name].read(Box(*box)), target)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def _parts(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        parts: list[Wanted] = []
        for name, box in wanted:
            codes, scale = self.codes[name].codes, self.codes[name].scale
            parts.append((codes.name, box))
            if scale.source is self.inner:
                parts.append((scale.name, whole_box(scale).bounds))
        return parts


class _Memory:
    """A `TensorSource` of tensors in memory, which no rank needs to ask another one for.

    Args:
        tensors: The tensors by name.
    """

    key, is_shared, is_local, num_records = "memory", False, True, None

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        return []

    def check_own(self, wanted: Sequence[Wanted], flags: Sequence[int], rank: int, count: int) -> None:
        pass

    def find(self, requests: Sequence[Sequence[Wanted]]) -> Sequence[Any]:
        return []

    def learn(self, wanted: Sequence[Wanted], found: Any) -> None:
        pass

    def fill(self, name: str, box: Bounds, target: memoryview) -> None:
        slices = tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))
        value = self._tensors[name]
        _copy((value.read() if isinstance(value, LazyTensor) else value.detach())[slices], target)

    def check_unchanged(self) -> None:
        pass


def _copy(values: torch.Tensor, target: memoryview) -> None:
    """Copy a tensor's elements into memory, packed."""
    data = torch.frombuffer(target, dtype=torch.uint8)
    data.copy_(values.cpu().contiguous().reshape(-1).view(torch.uint8))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
