"""Small valid checkpoints of every format that is read, for tests that damage them."""

from __future__ import annotations

import json
import pickle
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.filesystem import SerializationFormat

from mmfsdp.checkpoint import convert

__all__ = ["content", "weights", "write_samples"]


def weights(step: int = 0) -> dict[str, torch.Tensor]:
    """Return weights of one step: the same names and shapes for every step, other values."""
    generator = torch.Generator().manual_seed(step)
    return {
        "encoder.weight": torch.randn(6, 5, generator=generator),
        "encoder.bias": torch.randn(5, generator=generator).bfloat16(),
        "head.weight": torch.randn(4, 3, 2, generator=generator),
        "steps": torch.tensor(step + 1),
    }


def content(step: int = 0) -> dict[str, Any]:
    """Return what training saves: weights, optimizer state and what is no tensor."""
    held = weights(step)
    names = ["encoder.weight", "encoder.bias", "head.weight"]
    state = {i: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(held[name])} for i, name in enumerate(names)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2], "param_names": names}
    return {
        "state_dict": held,
        "optimizer": {"state": state, "param_groups": [group]},
        "meta": {"epoch": step, "text": "ä"},
    }


def write_samples(directory: Path, step: int = 0) -> dict[str, Path]:
    """Write a checkpoint of each format and return them by its name."""
    torch.save(content(step), directory / "zip.pth")
    torch.save(content(step), directory / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(weights(step), directory / "plain.safetensors")
    convert(directory / "zip.pth", directory / "ours.safetensors", fsync=False)
    convert(directory / "zip.pth", directory / "ours.pth", keep="all", fsync=False)
    convert(directory / "zip.pth", directory / "index", max_shard_size=130, fsync=False)
    convert(directory / "zip.pth", directory / "local", to="local", ranks=2, fsync=False)
    convert(directory / "zip.pth", directory / "dcp", to="dcp", ranks=2, fsync=False)
    _save_dcp(directory / "torch_dcp", content(step))
    _save_dcp(directory / "dcp_safetensors", {"model": weights(step)}, SerializationFormat.SAFETENSORS)
    _save_bins(directory / "bins", step)
    _save_ranks(directory / "safetensors_ranks", step)
    _save_stock(directory / "stock", step)
    names = ["zip.pth", "legacy.pth", "plain.safetensors", "ours.safetensors", "ours.pth", "index", "local", "dcp"]
    names += ["torch_dcp", "dcp_safetensors", "bins", "safetensors_ranks", "stock"]
    return {name: directory / name for name in names}


def _save_dcp(directory: Path, value: dict[str, Any], kind: SerializationFormat | None = None) -> None:
    options = {} if kind is None else {"serialization_format": kind}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(value, storage_writer=dcp.FileSystemWriter(directory, **options), no_dist=True)


def _save_bins(directory: Path, step: int) -> None:
    directory.mkdir()
    held, files = weights(step), ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    places = dict(zip(held, [files[0], files[0], files[1], files[1]], strict=True))
    for index, file in enumerate(files):
        part = {name: held[name] for name in held if places[name] == file}
        torch.save(part, directory / file, _use_new_zipfile_serialization=index == 0)
    text = json.dumps({"metadata": {}, "weight_map": places}, indent=1)
    (directory / "pytorch_model.bin.index.json").write_text(text)


def _save_ranks(directory: Path, step: int) -> None:
    directory.mkdir()
    for rank in range(2):
        whole = weights(step)["encoder.weight"]
        info = json.dumps({"encoder.weight": {"saved_offsets": [3 * rank, 0]}})
        save_file(
            {"encoder.weight": whole[3 * rank : 3 * rank + 3].contiguous()},
            directory / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": info},
        )


class _Sharded:
    """A ShardedTensor of two ranks, without a process group to ask."""

    def __init__(self, local: torch.Tensor, offsets: list[int], shape: list[int], rank: int) -> None:
        box = ShardMetadata(shard_offsets=offsets, shard_sizes=list(local.shape), placement=f"rank:{rank}/cpu")
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        described = ShardedTensorMetadata([box], torch.Size(shape), TensorProperties(dtype=local.dtype))
        group = ShardedTensor.ProcessGroupState(rank, rank, 2, 2)
        self.state = ([Shard(local, box)], described, group, spec, False)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Sharded):
            return NotImplemented
        rebuild = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, ShardedTensor, (), value.state)


def _save_stock(directory: Path, step: int) -> None:
    """Write what stock MMEngine does for FSDP1 with use_orig_params=True on two ranks."""
    directory.mkdir()
    whole = weights(step)["encoder.weight"][:4, :4].contiguous()
    for rank in range(2):
        flat, rows = whole.flatten()[8 * rank : 8 * rank + 8].clone(), whole[2 * rank : 2 * rank + 2].clone()
        sharded = _Sharded(flat, [8 * rank], [16], rank)
        state = {"w": {"step": torch.tensor(1.0), "exp_avg": _Sharded(rows, [2 * rank, 0], [4, 4], rank)}}
        tree = {
            "state_dict": OrderedDict([("w", flat), ("_flat_param", sharded), ("buffer", torch.ones(3))]),
            "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
            "meta": {"epoch": 1, "iter": 2},
        }
        module = types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")
        torch.save(tree, directory / f"rank{rank}.pth", pickle_module=module)
