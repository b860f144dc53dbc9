"""Train a Hugging Face model that mmfsdp has sharded with transformers' `Trainer`, save, and resume.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/hf_trainer.py --dir run

docs/howto/frameworks.md explains it. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mmfsdp


class ShardedTrainer(Trainer):
    """A `Trainer` of a model that mmfsdp has sharded; its checkpoints hold shards."""

    def __init__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        model._is_accelerate_prepared = True  # accelerate then passes it through
        super().__init__(model, *args, **kwargs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return mmfsdp.clip_grad_norm_(model, self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call:  # a checkpoint to resume from
            extra = {"scheduler": self.lr_scheduler.state_dict()}
            mmfsdp.save_checkpoint(Path(output_dir) / "sharded", self.model, self.optimizer, extra=extra)
        else:
            self._save(output_dir, state_dict=mmfsdp.model_state_dict(self.model))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass  # saved with the weights

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        pass  # loaded with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra, _ = mmfsdp.load_checkpoint(Path(checkpoint) / "sharded", self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self) -> None:
        mmfsdp.load_checkpoint(Path(self.state.best_model_checkpoint) / "sharded", self.model)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, the same on every rank."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build() -> LlamaForCausalLM:
    """A small model, the same wherever it is built."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def main() -> None:
    """Train some steps, save a folder of Hugging Face, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints go; all nodes see it")
    parser.add_argument("--steps", type=int, default=6, help="how many steps to train in all")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--alone", action="store_true", help="train in one process, without mmfsdp, as a reference")
    given = parser.parse_args()

    args = TrainingArguments(
        output_dir=str(given.dir),
        max_steps=given.steps,
        per_device_train_batch_size=8 if given.alone else 4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    if given.alone:
        trainer = Trainer(build(), args, train_dataset=Tokens())
    else:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        model = mmfsdp.shard(build(), {"wrap": {"kind": "module_class", "classes": "LlamaDecoderLayer"}})
        trainer = ShardedTrainer(model, args, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(str(given.dir / "trained"))
    if trainer.is_world_process_zero():
        curve = {
            line["step"]: (line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line
        }
        print("CURVE", json.dumps(curve))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
