"""Divides a global batch among the ranks that there are, and a rank's share into the parts that it computes at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from mmengine.dist import get_world_size
from mmengine.registry import FUNCTIONS

from mmfsdp import accumulation_steps
from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.configs.lookup import check_known

__all__ = ["Parts", "collate_in_parts", "divide_loader"]


class Parts(list[Any]):
    """A rank's share of a batch: the batches that it computes one after the other."""


def divide_loader(dataloader: Any, global_batch_size: int) -> dict[str, Any]:
    """Return the config of a data loader whose batches are this rank's share of a global batch.

    Args:
        dataloader: The config. Its ``batch_size`` is the most that a rank computes at once. Not changed.
        global_batch_size: Samples per iteration, over all ranks.

    Raises:
        ConfigError: The ranks cannot share the batch evenly, or ``dataloader`` is not a config with a ``batch_size``.
    """
    if not hasattr(dataloader, "items") or "batch_size" not in dataloader:
        raise ConfigError(
            "global_batch_size needs train_dataloader=dict(batch_size=..., ...), where batch_size is the most that a "
            f"rank computes at once; train_dataloader is a {type(dataloader).__name__}.",
            config="strategy.global_batch_size",
        )
    num_parts = accumulation_steps(global_batch_size, dataloader["batch_size"])
    divided = {**dataloader, "batch_size": global_batch_size // get_world_size()}
    if num_parts > 1:
        collate = _collate_of(dataloader.get("collate_fn", {"type": "pseudo_collate"}))
        divided["collate_fn"] = {"type": collate_in_parts, "num_parts": num_parts, **collate}
    return divided


def _collate_of(given: Any) -> dict[str, Any]:
    """Return the arguments of `collate_in_parts` that say how one part is collated."""
    if not hasattr(given, "items"):
        return {"collate": given, "arguments": {}}
    check_known(given, FUNCTIONS, "dataloader.collate_fn")
    arguments = {name: value for name, value in given.items() if name != "type"}
    kind = given["type"]
    return {"collate": FUNCTIONS.get(kind) if isinstance(kind, str) else kind, "arguments": arguments}


def collate_in_parts(
    samples: Sequence[Any], num_parts: int, collate: Callable[..., Any], arguments: dict[str, Any]
) -> Parts:
    """Collate samples into parts of the same size; in the last batch of an epoch, sizes may differ by one.

    Args:
        samples: A rank's share of a batch.
        num_parts: How many parts; no more than there are samples.
        collate: Collates the samples of a part.
        arguments: Its keyword arguments.
    """
    num_parts = min(num_parts, len(samples))
    ends = [len(samples) * index // num_parts for index in range(num_parts + 1)]
    return Parts(collate(samples[begin:end], **arguments) for begin, end in itertools.pairwise(ends))
