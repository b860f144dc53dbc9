"""Train the model of a Hugging Face folder with the settings that `mmfsdp-cli fit --write` has chosen.

    torchrun --nproc-per-node 2 examples/hf_loop/from_folder.py FOLDER settings.yaml --dir runs/llama

docs/tutorials/rent_gpus.md explains it. Its tokens are random: put your data in their stead.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import mmfsdp
from mmfsdp.rehearsal import FirstSteps


def main() -> None:
    """Train some steps, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the model's config.json")
    parser.add_argument("settings", type=Path, help="file of settings")
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints go; all nodes see it")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step, of one sample each")
    parser.add_argument("--steps", type=int, default=10, help="steps of the whole training")
    parser.add_argument(
        "--device", help="what was rented, such as h100@ib-400: compare the first steps with the forecast"
    )
    args = parser.parse_args()

    config = AutoConfig.from_pretrained(args.folder, local_files_only=True)
    config.use_cache = False  # of keys and values, which only generation needs
    settings = mmfsdp.ShardConfig.from_file(args.settings)
    with mmfsdp.parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mmfsdp.init_process_group()
    rank = dist.get_rank()

    first = None
    if rank == 0 and args.device is not None:
        batch = dict.fromkeys(("input_ids", "labels"), torch.empty(1, args.tokens, dtype=torch.int64, device="meta"))
        plan = mmfsdp.plan(model, settings, dist.get_world_size())
        several = {"accumulate": args.accumulate, "reduce_each": True, "max_norm": 1.0}
        first = FirstSteps(mmfsdp.rehearse(plan, model, batch, device=args.device, **several))

    model = mmfsdp.apply_plan(model, mmfsdp.plan(model, settings), param_init_fn=model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(rank)
    with mmfsdp.CheckpointManager(args.dir, model, optimizer, every_minutes=30) as manager:
        for step in range(manager.resume() + 1, args.steps + 1):
            total = 0.0
            for _ in range(args.accumulate):  # without mmfsdp.no_sync: gradients are reduced with each
                tokens = torch.randint(config.vocab_size, (1, args.tokens), generator=generator).to(device)
                loss = model(input_ids=tokens, labels=tokens).loss / args.accumulate
                loss.backward()
                total += loss.item()
            mmfsdp.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {total:.1f}", flush=True)
            if first is not None and (line := first.step()):
                print(line, flush=True)
            manager.step(step)
        manager.save(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
