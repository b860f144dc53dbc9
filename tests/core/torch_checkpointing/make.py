"""Writes a checkpoint with torch_checkpointing, and what its own loader reads of it.

    pip install torch_checkpointing==0.1.1
    python tests/core/torch_checkpointing/make.py DIRECTORY PARALLELISM RANKS     # such as: fsdp-2 fsdp 2

The library gathers metadata on a GPU. On a machine without one this script gives it the CPU for that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.core.dtensors.make import content_of, finish, run

PARALLELISM, RANKS = sys.argv[2], int(sys.argv[3])


def _empty(tree: Any) -> Any:
    """Return nested content with zeros for each tensor, whole."""
    if isinstance(tree, dict):
        return {key: _empty(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_empty(value) for value in tree]
    return torch.zeros(tree.shape, dtype=tree.dtype) if isinstance(tree, torch.Tensor) else tree


def _main(rank: int, directory: str) -> None:
    import torch.distributed as dist
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    made = torch.tensor
    torch.tensor = lambda *args, device=None, **rest: made(*args, **rest)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    content = content_of(rank, RANKS, PARALLELISM)
    items = {key: ItemSpec(resharder=DefaultResharder()) for key in ("model", "optimizer")}
    manager = CheckpointManager(
        CheckpointManager.Config(
            items=items,
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # fails on ext4 otherwise
        )
    )
    content |= {"step": 7, "rng": torch.full((2,), rank)}
    manager.save(f"{directory}/step_7", content)
    dist.barrier()  # the first rank moves the directory to its place
    read = manager.load(f"{directory}/step_7", into=_empty({key: content[key] for key in items}))
    own = [torch.full((2,), rank) for rank in range(RANKS)]  # what is each rank's own: a list by rank
    finish(directory, {**read, "step": 7, "epoch": 3, "rng": own if RANKS > 1 else own[0]})


if __name__ == "__main__":
    run(_main, RANKS)
