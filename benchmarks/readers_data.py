"""Writes one model's weights in the layout of each writer, on four ranks: ``python ... LAYOUT PATH BYTES``.

It imports nothing of mmfsdp, so that the environment that has the writer runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.deepspeed_data import write as write_stage

RANKS, SIDE = 4, 2048
LLAMA = {"hidden_size": SIDE, "intermediate_size": 2 * SIDE, "num_attention_heads": 16, "vocab_size": 4096}


def layers(nbytes: int) -> nn.Module:
    """Return a model of square float32 matrices that take up about ``nbytes`` bytes."""
    count = max(2, nbytes // SIDE**2 // 4)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)))


def fsdp1(nbytes: int) -> Any:
    """Return the same, sharded by FSDP1 with a unit for every matrix."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = layers(nbytes)
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device("cpu")
    )


def _sharded(module: nn.Module, *names: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=names or None))
    return module.state_dict()


def verl(rank: int, path: Path, nbytes: int) -> None:
    """A Llama in bfloat16, in the files that verl's checkpoint manager leaves."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    matrices = 4 * SIDE**2 + 3 * 2 * SIDE**2  # elements of a layer
    config = LlamaConfig(**LLAMA, num_hidden_layers=max(1, nbytes // 2 // matrices), dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.save(_sharded(model, "fsdp"), path / f"model_world_size_{RANKS}_rank_{rank}.pt")
    if rank == 0:
        config.save_pretrained(path / "huggingface")
        tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path / "huggingface")
        (path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))


def local_files(rank: int, path: Path, nbytes: int) -> None:
    """FSDP1's LOCAL_STATE_DICT in a file of each rank, and whole weights that say the shapes."""
    torch.save(_state_dict(nbytes, "LOCAL_STATE_DICT"), path / f"model_rank_{rank}.pt")
    if rank == 0:
        torch.save(layers(nbytes).state_dict(), path.with_suffix(".pth"))


def sharded_files(rank: int, path: Path, nbytes: int) -> None:
    """FSDP1's SHARDED_STATE_DICT in a file of each rank."""
    torch.save(_state_dict(nbytes, "SHARDED_STATE_DICT"), path / f"model_rank_{rank}.pt")


def local_dcp(rank: int, path: Path, nbytes: int) -> None:
    """FSDP1's LOCAL_STATE_DICT in DCP, and whole weights that say the shapes."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_state_dict(nbytes, "LOCAL_STATE_DICT"), checkpoint_id=path)
    if rank == 0:
        torch.save(layers(nbytes).state_dict(), path.with_suffix(".pth"))


def _state_dict(nbytes: int, kind: str) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = fsdp1(nbytes)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        return model.state_dict()


def distributed_safetensors(rank: int, path: Path, nbytes: int) -> None:
    """Safetensors of each rank, from torch's writer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(path=str(path), save_distributed=True)
    dcp.save(_sharded(layers(nbytes)), storage_writer=writer)


def torch_checkpointing(rank: int, path: Path, nbytes: int) -> None:
    """torch_checkpointing's files. It gathers metadata on a GPU, for which this answers."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    made = torch.tensor
    torch.tensor = lambda *args, device=None, **rest: made(*args, **rest)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]
    config = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    CheckpointManager(config).save(str(path), {"model": _sharded(layers(nbytes))})


def megatron(rank: int, path: Path, nbytes: int) -> None:
    """Megatron-Core's torch_dist, tensors divided among all ranks. It asks for a GPU, for which this answers."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    names = layers(nbytes).state_dict()
    parts = {name: torch.randn(SIDE // RANKS, SIDE) for name in names}
    model = {name: ShardedTensor.from_rank_offsets(name, part, (0, rank, RANKS)) for name, part in parts.items()}
    dist_checkpointing.save(model, str(path))


def fairscale(rank: int, path: Path, nbytes: int) -> None:
    """fairscale's local state dicts with its metadata."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    def wrap(module: nn.Module) -> Any:
        return FullyShardedDataParallel(module, compute_device=torch.device("cpu"))

    model = wrap(nn.Sequential(*map(wrap, layers(nbytes))))  # type: ignore[arg-type]
    content = {"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}
    torch.save(content, path / f"checkpoint_1-shard{rank}.pt")


def stage(number: int, rank: int, path: Path, nbytes: int) -> None:
    """DeepSpeed's stage 2 or 3, with AdamW's moments."""
    if rank == 0:
        write_stage(number, path, nbytes)


def universal(rank: int, path: Path, nbytes: int) -> None:
    """DeepSpeed's universal checkpoint, which its script makes of stage 3."""
    if rank:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    write_stage(3, path / "stage3", nbytes)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(path / "stage3/global_step1"), "output_folder": str(path / "universal")}
    ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))
    shutil.rmtree(path / "stage3")


def legacy(rank: int, path: Path, nbytes: int) -> None:
    """A file as torch wrote it before 1.6."""
    if rank == 0:
        torch.save(layers(nbytes).state_dict(), path / "model.pth", _use_new_zipfile_serialization=False)


def index(rank: int, path: Path, nbytes: int) -> None:
    """Four files with the index of Hugging Face."""
    from safetensors.torch import save_file

    names = list(layers(nbytes).state_dict())
    held = {name: f"model-{1 + i * RANKS // len(names):05d}-of-{RANKS:05d}.safetensors" for i, name in enumerate(names)}
    for file in {*held.values()} if rank == 0 else ():
        save_file({name: torch.randn(SIDE, SIDE) for name in names if held[name] == file}, path / file)
    if rank == 0:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


LAYOUTS: dict[str, Callable[[int, Path, int], None]] = {
    "verl": verl,
    "local_files": local_files,
    "sharded_files": sharded_files,
    "local_dcp": local_dcp,
    "distributed_safetensors": distributed_safetensors,
    "torch_checkpointing": torch_checkpointing,
    "megatron": megatron,
    "fairscale": fairscale,
    "stage2": partial(stage, 2),
    "stage3": partial(stage, 3),
    "universal": universal,
    "legacy": legacy,
    "index": index,
}


def on_rank(rank: int, store: str, function: Callable[..., None], *args: Any) -> None:
    """Call a function on a rank of a gloo world."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function: Callable[..., None], *args: Any) -> None:
    """Call a function on every rank, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (f"{folder}/store", function, *args), RANKS)


if __name__ == "__main__":
    target = Path(sys.argv[2])
    if sys.argv[1] != "torch_checkpointing":  # it makes its own directory
        target.mkdir()
    on_ranks(LAYOUTS[sys.argv[1]], target, int(sys.argv[3]))
