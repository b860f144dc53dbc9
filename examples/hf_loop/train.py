"""Train a Hugging Face model in your own loop: sharded, saved in the background, resumed on any number of ranks.

    torchrun --nproc-per-node 2 examples/hf_loop/train.py --dir runs/sums --steps 12

docs/tutorials/train_a_model.md explains every part. The model is small and its weights are random: no download.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import mmfsdp

MODEL = LlamaConfig(
    vocab_size=128,  # one token per ASCII character
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SHARDING = {
    "wrap": {"kind": "module_class", "classes": "LlamaDecoderLayer"},
    "precision": "fp32",  # on GPUs: "bf16"
}
BATCH = 16  # sequences per step, over all ranks
ACCUMULATE = 2  # forward and backward passes per step


def build() -> PreTrainedModel:
    """Return the model without memory for its parameters: they are initialised when the model is sharded."""
    with mmfsdp.parameters_on_meta():
        return AutoModelForCausalLM.from_config(MODEL)


def text_batch(generator: torch.Generator) -> torch.Tensor:
    """Return the tokens of one step, (BATCH, 32): sums such as `12+30=42;`, the same on every rank."""
    rows = []
    for _ in range(BATCH):
        a, b = torch.randint(0, 50, (2, 4), generator=generator).tolist()
        text = "".join(f"{x}+{y}={x + y};" for x, y in zip(a, b, strict=True))
        rows.append([ord(character) for character in text.ljust(32)[:32]])
    return torch.tensor(rows)


def learning_rate(step: int) -> float:
    """Return the factor of the learning rate: three steps of warm-up, then slowly down."""
    return min(1.0, (step + 1) / 3) * 0.99**step


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Do one step on this rank's part of the tokens and return the mean loss over all ranks."""
    own = tokens[dist.get_rank() :: dist.get_world_size()].to(device)
    total = torch.zeros((), device=device)
    for number, part in enumerate(own.chunk(ACCUMULATE)):
        last = number == ACCUMULATE - 1
        with contextlib.nullcontext() if last else mmfsdp.no_sync(model):
            loss = model(input_ids=part, labels=part).loss / ACCUMULATE
            loss.backward()
        total += loss.detach()
    mmfsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Sums:
    """The training data, whose position is the state of a generator: the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def next_batch(self) -> torch.Tensor:
        """Return the tokens of the next step."""
        return text_batch(self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the position."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Go to a position."""
        self.generator.set_state(state_dict["generator"])


def main() -> None:
    """Train, from the latest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/sums"), help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=12, help="steps of the whole training")
    parser.add_argument("--stop-after", type=int, help="stop when this many steps are done, as a time limit would")
    parser.add_argument("--save-every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--plan", type=int, metavar="RANKS", help="print the plan for this many ranks, and exit")
    parser.add_argument("--config", type=Path, metavar="FOLDER", help="write the model's config.json, and exit")
    args = parser.parse_args()

    if args.config is not None:
        MODEL.save_pretrained(args.config)
        return
    model = build()
    if args.plan is not None:
        print(mmfsdp.plan(model, SHARDING, args.plan))
        return

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mmfsdp.init_process_group()
    is_first = dist.get_rank() == 0

    plan = mmfsdp.plan(model, SHARDING)
    model = mmfsdp.apply_plan(model, plan, param_init_fn=model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, learning_rate)
    data = Sums()

    stop = min(args.steps, args.stop_after or args.steps)
    with mmfsdp.CheckpointManager(
        args.dir,
        model,
        optimizer,
        every_steps=args.save_every,
        max_to_keep=2,
        schedulers=scheduler,
        state={"data": data},
    ) as manager:
        done = manager.resume()
        if is_first and done:
            print(f"resumed after step {done}; ranks: {dist.get_world_size()}", flush=True)
        for step in range(done + 1, stop + 1):
            loss = train_step(model, optimizer, data.next_batch(), device)
            scheduler.step()
            if is_first:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
            manager.step(step)
        manager.save(stop)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
