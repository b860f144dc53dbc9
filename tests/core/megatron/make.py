"""Writes a torch_dist checkpoint with Megatron's own functions, and what the ranks put into it.

    pip install --no-deps megatron-core==0.16.1 && pip install psutil
    python tests/core/megatron/make.py DIRECTORY

Four ranks: two of data parallelism times two of tensor parallelism, with a padded vocabulary, layers in one tensor,
extra state, and the optimizer's state under the names of parameters. Megatron asks for a GPU in a few places where a
CPU will do; this script answers for it.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS = 4


def _main(rank: int, store: str, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tp, dp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    torch.manual_seed(0)
    full = {  # name to the whole, and the dimension that tensor parallelism divides
        "embedding.word_embeddings.weight": (torch.randn(10, 6), 0),
        "decoder.layers.self_attention.linear_proj.weight": (torch.randn(3, 6, 4).bfloat16(), 2),  # three layers
        "decoder.final_layernorm.weight": (torch.randn(6), None),
    }
    local = {name: nn.Parameter(t if dim is None else t.chunk(2, dim)[tp].clone()) for name, (t, dim) in full.items()}
    model = {}
    for name, (_, dim) in full.items():
        offsets = [] if dim is None else [(dim, tp, 2)]
        replica = dp if dim is not None else rank
        model[name] = ShardedTensor.from_rank_offsets(name, local[name], *offsets, replica_id=replica)
    optimizer = torch.optim.AdamW(local.values(), lr=0.1)
    for name, param in local.items():
        param.grad = torch.full_like(param, 1 + len(name))
    optimizer.step()
    state = optimizer.state_dict()
    named = get_param_id_to_sharded_param_map(model, local.values())
    optim_state_to_sharding_state(state, named, exclude_keys=("step",))
    extra = {  # Transformer Engine's is bytes
        name: ShardedObject(f"decoder.{name}", data, (1,), (0,), replica_id=rank)
        for name, data in (("_extra_state", io.BytesIO(b"scales")), ("rng_state", {"seed": 1}))
    }
    content = {"model": {**model, **extra}, "optimizer": state, "iteration": 7}
    dist_checkpointing.save(content, f"{directory}/iter_0000007")

    def whole(name: str, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.detach(), group=parallel_state.get_tensor_model_parallel_group())
        dim = full[name][1]
        return parts[0] if dim is None else torch.cat(parts, dim)

    weights = {name: whole(name, param) for name, param in local.items()}
    moments = {
        name: {key: whole(name, optimizer.state[param][key]) for key in ("exp_avg", "exp_avg_sq")}
        for name, param in local.items()
    }
    if rank == 0:
        torch.save({"weights": weights, "state": moments}, f"{directory}/full.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    (target / "iter_0000007").mkdir(parents=True)
    mp.spawn(_main, (f"{tempfile.mkdtemp()}/store", str(target)), RANKS)
