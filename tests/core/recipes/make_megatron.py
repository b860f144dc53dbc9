"""Writes small GPT models of Megatron-Core as torch_dist, and the logits that they compute.

    pip install --no-deps megatron-core==0.16.1 && pip install psutil
    python tests/core/recipes/make_megatron.py tests/core/recipes/golden/megatron-0.16.1

Two ranks of tensor parallelism. ``qwen2`` has biases of q, k and v, tied embeddings, a padded vocabulary, and all
layers in one tensor, which is Megatron's default. ``qwen3`` has norms of q and k, heads of their own size, and tensors
for each layer and for both halves of the MLP, as ``singleton_local_shards`` writes them. ``qwen3_moe`` has four
experts, two on each rank, in one tensor for all layers and experts, and so has ``mixtral``; ``qwen2_moe`` has two,
divided by tensor parallelism, in tensors of their own, and a shared expert. Megatron asks for a GPU in a few places
where a CPU will do; this script answers for it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24}
EXPERTS = {"moe_ffn_hidden_size": 8, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2": ({"add_qkv_bias": True}, {"share_embeddings_and_output_weights": True}, {}),
    "qwen3": ({"qk_layernorm": True, "kv_channels": 6}, {}, {"singleton_local_shards": True}),
    "qwen3_moe": ({"qk_layernorm": True, "num_moe_experts": 4, "expert_model_parallel_size": 2, **EXPERTS}, {}, {}),
    "mixtral": ({"num_moe_experts": 4, "expert_model_parallel_size": 2, **EXPERTS}, {}, {}),
    "qwen2_moe": (
        {
            "add_qkv_bias": True,
            "num_moe_experts": 2,
            "expert_tensor_parallel_size": 2,
            "moe_shared_expert_intermediate_size": 12,
            "moe_shared_expert_gate": True,
            **EXPERTS,
        },
        {},
        {"singleton_local_shards": True},
    ),
}
VOCABULARY, PADDED = 50, 64


def _main(rank: int, store: str, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    get_cuda_rng_tracker().fork = nullcontext  # dropout is off
    moe_utils.te_general_gemm = None  # without Transformer Engine it is asked for, and not there
    for name, (settings, embeddings, metadata) in MODELS.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=settings.get("expert_model_parallel_size", 1),
            expert_tensor_parallel_size=settings.get("expert_tensor_parallel_size", 1),
        )
        config = TransformerConfig(
            **SIZES,
            **settings,
            tensor_model_parallel_size=2,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            use_cpu_initialization=True,
            hidden_dropout=0,
            attention_dropout=0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
        )
        spec = get_gpt_layer_local_spec(
            config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
        )
        model = GPTModel(
            config,
            spec,
            vocab_size=PADDED,
            max_sequence_length=32,
            position_embedding_type="rope",
            **{"share_embeddings_and_output_weights": False, **embeddings},
        ).eval()
        for key, parameter in model.named_parameters():
            divided = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(len(key) + (100 * rank if divided else 0))
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.copy_(noise + 1 if "norm" in key else noise)
        ids = torch.arange(12).reshape(2, 6) * 3
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            own = model(ids, torch.arange(6)[None].expand(2, -1), mask).contiguous()
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        content = model.sharded_state_dict(metadata=metadata or None)
        if rank == 0:
            Path(directory, name).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save({**content, "iteration": 1}, f"{directory}/{name}")
        if rank == 0:
            torch.save({"ids": ids, "logits": torch.cat(parts, -1)[..., :VOCABULARY].clone()}, f"{directory}/{name}.pt")
            print(*torch.load(f"{directory}/{name}.pt")["logits"].shape)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(_main, (f"{tempfile.mkdtemp()}/store", str(Path(sys.argv[1]).resolve())), 2)
