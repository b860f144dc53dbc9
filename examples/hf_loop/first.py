"""The shortest loop: shard a Hugging Face model, train three steps, save. docs/tutorials/train_a_model.md shows it.

torchrun --nproc-per-node 2 examples/hf_loop/first.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from train import MODEL, text_batch
from transformers import AutoModelForCausalLM

import mmfsdp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = mmfsdp.shard(AutoModelForCausalLM.from_config(MODEL), wrap="LlamaDecoderLayer")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.Generator().manual_seed(0)
for step in range(1, 4):
    tokens = text_batch(data)[dist.get_rank() :: dist.get_world_size()]  # the rank's part of the batch
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.2f}", flush=True)
mmfsdp.save_checkpoint("runs/first", model, optimizer)
dist.destroy_process_group()
