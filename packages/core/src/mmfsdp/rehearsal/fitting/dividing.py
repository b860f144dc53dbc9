"""Divides the samples of a step into micro-batches, and counts them and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mmfsdp.errors import ConfigError

__all__ = ["all_micro_batches", "micro_batch", "samples_of", "tokens_of"]


def samples_of(batch: Any, dim: int = 0) -> int:
    """Return how many samples a batch has: the size that its tensors share in a dimension; 1 if they share none.

    Lists of objects, as data loaders of MMEngine give them, have an entry for each sample; so have lists beside them
    that are as long.

    Args:
        batch: Tensors in any structure; those with fewer dimensions are not divided.
        dim: The dimension of the samples.

    Raises:
        ConfigError: No tensor has this dimension.
    """
    return _shared_size(batch, dim) or 1


def tokens_of(batch: Any) -> int | None:
    """Return how many tokens a batch has: the elements of its largest tensor of integers with two dimensions."""
    found = [
        leaf.numel()
        for leaf in tree_leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.dtype in (torch.int64, torch.int32)
    ]
    return max(found, default=None)


def micro_batch(batch: Any, count: int, dim: int = 0) -> Any:
    """Return one of ``count`` equal parts of a batch.

    Raises:
        ConfigError: Its samples cannot be divided by ``count``.
    """
    if count == 1:
        return batch
    samples = samples_of(batch, dim)
    if samples % count:
        raise ConfigError(f"{samples} samples cannot be divided into {count} micro-batches.", config="accumulate")
    size = samples // count
    return _map_samples(batch, dim, lambda tensor: tensor.narrow(dim, 0, size), lambda items: items[:size])


def all_micro_batches(batch: Any, count: int, dim: int = 0) -> Any:
    """Return a batch with the samples of ``count`` micro-batches.

    Raises:
        ConfigError: It is not known what a sample is.
    """
    if count == 1:
        return batch
    if _shared_size(batch, dim) is None:
        raise ConfigError(
            f"The tensors of the batch share no size in dimension {dim}, so their samples cannot be divided into other "
            "micro-batches. Give the batch of one micro-batch without accumulate.",
            config="accumulate",
        )
    return _map_samples(batch, dim, lambda tensor: torch.cat([tensor] * count, dim), lambda items: items * count)


def _shared_size(batch: Any, dim: int) -> int | None:
    """Return the number of samples; None if tensors and lists have several."""
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not isinstance(dim, int) or dim < 0 or (dim and not any(len(shape) > dim for shape in shapes)):
        raise ConfigError(
            f"batch_dim is the dimension of the samples in the tensors of the batch, 0 or more, got {dim!r}; their "
            f"shapes are {', '.join(str(tuple(shape)) for shape in shapes)}.",
            config="batch_dim",
        )
    sizes: set[int] = set()

    def note_tensor(tensor: torch.Tensor) -> torch.Tensor:
        sizes.add(tensor.shape[dim])
        return tensor

    def note_list(items: list[Any]) -> list[Any]:
        sizes.add(len(items))
        return items

    _map_samples(batch, dim, note_tensor, note_list)
    return sizes.pop() if len(sizes) == 1 else None


def _map_samples(
    batch: Any, dim: int, of_tensor: Callable[[torch.Tensor], Any], of_list: Callable[[list[Any]], Any]
) -> Any:
    """Return a batch with functions applied to what has samples: tensors with the dimension, and lists of samples."""
    length = _length_of_lists(batch, dim)

    def is_of_samples(value: Any) -> bool:
        return isinstance(value, list) and value is not batch and len(value) == length

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return of_list(value)
        return of_tensor(value) if isinstance(value, torch.Tensor) and value.ndim > dim else value

    return tree_map(change, batch, is_leaf=is_of_samples)


def _length_of_lists(batch: Any, dim: int) -> int | None:
    """Return the length of the lists that have an entry for each sample; None if there are none."""
    lengths = {len(items) for items in _lists(batch) if not any(map(_has_tensor, items))}
    if len(lengths) != 1:
        return None
    [length] = lengths
    outside = tree_leaves(batch, is_leaf=lambda value: isinstance(value, list) and value is not batch)
    sizes = {leaf.shape[dim] for leaf in outside if isinstance(leaf, torch.Tensor) and leaf.ndim > dim}
    return length if sizes <= {length} else None


def _has_tensor(value: Any) -> bool:
    """Return whether a structure holds a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def _lists(value: Any, *, is_batch: bool = True) -> Iterator[list[Any]]:
    """Yield the lists in a batch, which is no such list itself: it may be one of positional arguments."""
    if isinstance(value, list) and value and not is_batch:
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _lists(inner, is_batch=False)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _lists(inner, is_batch=False)
