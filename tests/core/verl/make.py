"""Writes checkpoints with verl's own FSDPCheckpointManager on the CPU, and beside each what verl's merger makes of it.

    pip install torch==2.13.0 verl==0.9.1 'transformers<5.11'
    python tests/core/verl/make.py DIRECTORY

``actor`` is what verl writes for a model; ``full.pth`` holds what torch gathers, and ``merged``, in bfloat16, what
``verl.model_merger`` returns. verl takes a CPU for a GPU in a few places; this script answers for it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CASES = {"fsdp1-1": (1, "fsdp"), "fsdp1-2": (2, "fsdp"), "fsdp2-2": (2, "fsdp2")}


def _sharded(model: Any, mesh: Any, strategy: str) -> Any:
    """Shard a model as verl's FSDPEngine does."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_fsdp_wrap_policy
    from verl.workers.engine.fsdp.utils import get_sharding_strategy

    if strategy == "fsdp":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=get_fsdp_wrap_policy(module=model, config={}),
            device_id=torch.device("cpu"),
            sharding_strategy=get_sharding_strategy(mesh),
            device_mesh=mesh,
            use_orig_params=False,  # verl's default
        )
    state = model.state_dict()
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    fsdp2_load_full_state_dict(model, state, mesh, None)
    return model


def _gathered(model: Any, optimizer: Any, strategy: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    if strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {"model": model.state_dict()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def _main(rank: int, ranks: int, strategy: str, directory: str, store: str) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    import verl.utils.checkpoint.checkpoint_manager as manager
    import verl.utils.fsdp_utils as utils
    import verl.workers.engine.fsdp.utils as engine
    from transformers import AutoModelForCausalLM, LlamaConfig
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    for module in (manager, utils, engine):
        module.get_device_name = lambda: "cpu"
        module.get_device_id = lambda: torch.device("cpu")
    sizes = {"hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, vocab_size=7, max_position_embeddings=16, bos_token_id=1, eos_token_id=2)
    config.tie_word_embeddings = strategy == "fsdp2"
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = _sharded(model, engine.create_device_mesh(ranks, -1), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    ids = torch.arange(5).reshape(1, 5) + rank
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    scheduler.step()
    parts = ["model", "optimizer", "extra", *(["hf_model"] if strategy == "fsdp2" else [])]
    FSDPCheckpointManager(
        model, optimizer, scheduler, checkpoint_config={"save_contents": parts, "load_contents": parts}
    ).save_checkpoint(f"{directory}/actor", global_step=1)
    full = _gathered(model, optimizer, strategy)
    if rank == 0:
        merger = FSDPModelMerger(
            ModelMergerConfig(
                operation="merge",
                backend="fsdp",
                local_dir=f"{directory}/actor",
                hf_model_config_path=f"{directory}/actor/huggingface",
            )
        )
        full["merged"] = merger._load_and_merge_state_dicts(ranks, ranks, (ranks,), ("fsdp",))
        torch.save(full, f"{directory}/full.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name, (count, kind) in CASES.items():
        target = Path(sys.argv[1]).resolve() / name
        target.mkdir(parents=True)
        mp.spawn(_main, (count, kind, str(target), f"{tempfile.mkdtemp()}/store"), count)
