"""Puts the files of `readers_data.py` together with what each writer offers: ``python ... LAYOUT SOURCE TARGET BYTES``.

Where a writer has no script, this is the shortest program with its own loader, which leaves a file of ``torch.save``.
FSDP1's LOCAL and SHARDED state dicts can only be loaded by as many ranks as wrote them.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.readers_data import fsdp1, layers, on_ranks


def verl(source: Path, target: Path, nbytes: int) -> None:
    """``python -m verl.model_merger``."""
    options = ["--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(target)]
    sys.argv = ["verl.model_merger", "merge", *options]
    runpy.run_module("verl.model_merger", run_name="__main__")


def _gather(rank: int, kind: str, source: Path, target: Path, nbytes: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.api import load_with_process_group
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    model = fsdp1(nbytes)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        if (source / ".metadata").exists():
            state = model.state_dict()
            dcp.load(state, checkpoint_id=source)
        else:
            with load_with_process_group(dist.group.WORLD):
                state = torch.load(source / f"model_rank_{rank}.pt", weights_only=False)
        model.load_state_dict(state)
    config = FullStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        full = model.state_dict()
    if rank == 0:
        torch.save(full, target)


def local(source: Path, target: Path, nbytes: int) -> None:
    """FSDP1's own loader on four ranks, and its FULL_STATE_DICT."""
    on_ranks(_gather, "LOCAL_STATE_DICT", source, target, nbytes)


def sharded_files(source: Path, target: Path, nbytes: int) -> None:
    """FSDP1's own loader on four ranks, and its FULL_STATE_DICT."""
    on_ranks(_gather, "SHARDED_STATE_DICT", source, target, nbytes)


def distributed_safetensors(source: Path, target: Path, nbytes: int) -> None:
    """torch's function that consolidates such files."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    target.mkdir()
    names = sorted({name for path in source.glob("*.safetensors") for name in safe_open(path, "pt").keys()})  # noqa: SIM118 - not a dict
    consolidate_safetensors_files(str(source), str(target), dict.fromkeys(names, 1), num_threads=4)


def torch_checkpointing(source: Path, target: Path, nbytes: int) -> None:
    """Its loader into whole tensors, and ``torch.save``."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def load(rank: int) -> None:
        config = CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        empty = {name: torch.empty_like(tensor) for name, tensor in layers(nbytes).state_dict().items()}
        torch.save(CheckpointManager(config).load(str(source), into={"model": empty}), target)

    alone(load)


def megatron(source: Path, target: Path, nbytes: int) -> None:
    """``load_plain_tensors`` and ``torch.save``."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing

    alone(lambda rank: torch.save(dist_checkpointing.load_plain_tensors(str(source)), target))


def fairscale(source: Path, target: Path, nbytes: int) -> None:
    """``consolidate_shard_weights`` and ``torch.save``."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    files = [torch.load(path, weights_only=False) for path in sorted(source.glob("*-shard*.pt"))]
    metadata = [file["shard_metadata"] for file in files]
    torch.save(FullyShardedDataParallel.consolidate_shard_weights([file["model"] for file in files], metadata), target)


def stage(source: Path, target: Path, nbytes: int) -> None:
    """``zero_to_fp32``."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

    convert_zero_checkpoint_to_state_dict(str(source), str(target), max_shard_size=None)


def legacy(source: Path, target: Path, nbytes: int) -> None:
    """``torch.load`` and ``torch.save``."""
    torch.save(torch.load(source / "model.pth"), target)


def index(source: Path, target: Path, nbytes: int) -> None:
    """safetensors' ``load_file`` of each, and ``save_file``."""
    from safetensors.torch import load_file, save_file

    save_file(
        {name: it for path in sorted(source.glob("*.safetensors")) for name, it in load_file(path).items()}, target
    )


def alone(function: Callable[[int], None]) -> None:
    """Call a function in a world of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    function(0)
    dist.destroy_process_group()


PEERS: dict[str, Callable[[Path, Path, int], None]] = {
    "verl": verl,
    "local_files": local,
    "local_dcp": local,
    "sharded_files": sharded_files,
    "distributed_safetensors": distributed_safetensors,
    "torch_checkpointing": torch_checkpointing,
    "megatron": megatron,
    "fairscale": fairscale,
    "stage2": stage,
    "stage3": stage,
    "legacy": legacy,
    "index": index,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PEERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
