"""Runs what only an accelerator shows, on one GPU with NCCL and a world of one rank: ``pytest -m gpu``.

Without a GPU the tests are skipped. With ``MMFSDP_REHEARSE=1`` they run on the CPU with gloo, all but those about the
GPU's own memory and streams: a test should not fail for the first time on a borrowed machine.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REHEARSE = os.environ.get("MMFSDP_REHEARSE") == "1"
HERE = Path(__file__).parent
EXPECTED = (
    "FSDP is switching to use `NO_SHARD`",  # in a world of one rank; so is the next
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    "The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at it
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",  # and says so
    "Warning. Profiler clears events at the end of each cycle",
    "Synchronization debug mode is a prototype feature",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            for text in EXPECTED:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
            if not torch.cuda.is_available() and not REHEARSE:
                item.add_marker(pytest.mark.skip(reason="there is no GPU on this machine"))


@pytest.fixture
def on_cuda() -> None:
    """Asks for a GPU even in a rehearsal."""
    if not torch.cuda.is_available():
        pytest.skip("shows only on a GPU")


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """The device of a world of one rank, with both backends, as `torchrun` would start it."""
    cuda = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    for _ in range(2):  # what an error that a test expected still holds: first the graph, and then its tensors
        gc.collect()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=device if cuda else None,
    )
    yield device
    dist.destroy_process_group()
    if cuda:
        torch.cuda.empty_cache()
