"""The shortest loop: shard a Hugging Face model, train three steps, save. README.md shows it.

torchrun --nproc-per-node 2 examples/hf_loop/first.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import mmfsdp

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
mmfsdp.init_process_group()  # NCCL on GPUs, gloo on CPUs
torch.manual_seed(0)
model = mmfsdp.shard(AutoModelForCausalLM.from_config(config), wrap="LlamaDecoderLayer")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = torch.arange(16)[:, None] + torch.arange(32)  # 16 sequences that count
tokens = rows[dist.get_rank() :: dist.get_world_size()].to(model.device)  # the rank's part of the batch
for step in range(1, 4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.2f}", flush=True)
mmfsdp.save_checkpoint("runs/first", model, optimizer, overwrite=True)
dist.destroy_process_group()
