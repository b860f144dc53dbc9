"""Writes checkpoints with DeepSpeed on the CPU, and beside each what DeepSpeed itself makes of it.

    DS_ACCELERATOR=cpu python tests/core/deepspeed/make.py DIRECTORY [CASE ...]

The archives beside this file are such directories, packed with ``tar -C DIRECTORY -czf RELEASE.tar.gz .``; torch was
2.13 and MMEngine 0.10.7. The cases of pipelines have an archive of their own. ``truth.pth`` of a case holds what the
live engine gathers (``fp32``, ``exp_avg``, ``exp_avg_sq``) and what DeepSpeed's ``zero_to_fp32`` merges (``merged``;
without frozen parameters for stage 1, which it forgets).
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    ranks: int
    stage: int
    dtype: str
    groups: int = 1
    frozen: bool = False
    sub_group: int | None = None
    elastic: bool = False
    exclude_frozen: bool = False
    universal: bool = False
    accumulate: str | None = None
    each_step: bool = False


MMENGINE, PIPELINE, UNIVERSAL = "mmengine", "pipeline", "pipeline_universal"
CASES = {
    "zero1_2ranks_bf16": Case(2, 1, "bf16", frozen=True, universal=True),
    "zero1_2ranks_bf16_fp32_gradients": Case(2, 1, "bf16", groups=2, accumulate="fp32"),
    "zero2_2ranks_fp16_groups": Case(2, 2, "fp16", groups=2, frozen=True),
    "zero2_4ranks_elastic": Case(4, 2, "bf16", elastic=True),
    "zero2_1rank_fp32": Case(1, 2, "fp32"),
    "zero3_1rank": Case(1, 3, "bf16"),
    "zero3_2ranks_groups": Case(2, 3, "bf16", groups=2, frozen=True, each_step=True),
    "zero3_4ranks_subgroups": Case(4, 3, "fp16", frozen=True, sub_group=40, universal=True),
    "zero3_2ranks_unfrozen_only": Case(2, 3, "bf16", frozen=True, exclude_frozen=True),
    "zero0_2ranks": Case(2, 0, "bf16", frozen=True),
}


class Model(nn.Module):
    """Uneven sizes, a tied parameter, frozen ones if asked for, and two buffers.

    No parameter is without dimensions: DeepSpeed 0.19.8 fails to broadcast one.
    """

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.conv = nn.Conv1d(3, 5, 2)
        self.head, self.tied = nn.Linear(5, 3), nn.Linear(5, 3)
        self.tied.weight = self.head.weight
        if frozen:
            self.norm.bias.requires_grad_(False)
            self.conv.weight.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mean", torch.arange(5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(self.up(x).relu()) - self.mean.to(x.dtype))
        x = x + self.conv(x[:, None, :4].expand(-1, 3, -1)).mean(-1)
        return (self.head(x) + self.tied(x)).float()


def config_of(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's settings."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.stage, "elastic_checkpoint": case.elastic},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case.sub_group:
        config["zero_optimization"]["sub_group_size"] = case.sub_group
    if case.accumulate:
        config["data_types"] = {"grad_accum_dtype": case.accumulate}
    if case.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def engine_of(case: Case, model: nn.Module) -> Any:
    """Return DeepSpeed's engine for a model."""
    import deepspeed

    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups if case.groups == 2 else params, lr=0.02)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))[0]


def gathered(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the live engine gathers, by kind and parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    kinds: dict[str, dict[str, torch.Tensor]] = {"fp32": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, param in model.named_parameters():
        if param.requires_grad:
            kinds["fp32"][name] = safe_get_full_fp32_param(param).detach().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                kinds[kind][name] = safe_get_full_optimizer_state(param, kind).detach().clone()
    return {
        kind: {name: tensor.reshape(shape_of(model, name)) for name, tensor in found.items()}
        for kind, found in kinds.items()
    }


def shape_of(model: nn.Module, name: str) -> torch.Size:
    param = model.get_parameter(name)
    return getattr(param, "ds_shape", param.shape)


def save(case: Case, directory: Path) -> None:
    """Train for two steps and save. All ranks must call."""
    torch.manual_seed(0)
    model = Model(frozen=case.frozen)
    engine = engine_of(case, model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.dtype, torch.float32)
    for step in range(2):
        x = (torch.arange(10).reshape(2, 5) / 7 * (dist.get_rank() + 1) + step).to(dtype)
        engine.backward(engine(x).sum())
        engine.step()
        if step == 1 or case.each_step:
            engine.save_checkpoint(
                str(directory),
                tag=f"global_step{step + 1}",
                client_state={"epoch": 3, "history": {"loss": torch.tensor([0.5, 0.25])}},
                exclude_frozen_parameters=case.exclude_frozen,
            )
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed makes the state of all groups known after the step of the first, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, Any] = gathered(model) if case.stage else {}
    dist.barrier()
    if dist.get_rank() == 0:
        if case.stage and not case.accumulate:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            truth["merged"] = get_fp32_state_dict_from_zero_checkpoint(str(directory))
        torch.save(truth, directory / "truth.pth")
        for script in directory.glob("*.py"):
            script.unlink()
        if case.universal:
            make_universal(directory)
    dist.barrier()


def save_with_mmengine(directory: Path) -> None:
    """Train for an epoch with MMEngine's runner and its DeepSpeedStrategy. All ranks must call."""
    from mmengine.model import BaseModel
    from mmengine.runner import FlexibleRunner

    class Wrapped(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(frozen=True)

        def forward(self, x: list[torch.Tensor], mode: str = "tensor") -> Any:
            return {"loss": self.inner(torch.stack(x).bfloat16()).sum()}

    runner = FlexibleRunner(
        model=Wrapped(),
        work_dir=str(directory),
        strategy={
            "type": "DeepSpeedStrategy",
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "inputs_to_half": [],
        },
        train_dataloader={
            "batch_size": 2,
            "dataset": [{"x": torch.arange(5) / 7 + number} for number in range(8)],
            "sampler": {"type": "DefaultSampler", "shuffle": False},
        },
        optim_wrapper={"type": "DeepSpeedOptimWrapper", "optimizer": {"type": "AdamW", "lr": 0.02}},
        param_scheduler={"type": "MultiStepLR", "milestones": [1]},
        train_cfg={"by_epoch": True, "max_epochs": 1},
        default_hooks={"logger": None, "checkpoint": {"type": "CheckpointHook", "interval": 1}},
    )
    runner.train()
    if dist.get_rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        merged = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="epoch_1.pth")
        torch.save({"merged": merged}, directory / "truth.pth")
        for log in (*directory.glob("2*"), directory / "zero_to_fp32.py"):
            shutil.rmtree(log) if log.is_dir() else log.unlink()


def save_pipeline(directory: Path, *, universal: bool) -> None:
    """Train a pipeline of two stages on four ranks, with a frozen layer, and save. All ranks must call.

    Its ends are tied, but not if a universal checkpoint is made: DeepSpeed's script cannot do that.
    """
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    tied = TiedLayerSpec("ends", nn.Linear, 6, 6, bias=False)
    ends = [LayerSpec(nn.Linear, 6, 6) if universal else tied for _ in range(2)]
    inner = [LayerSpec(nn.Linear, 6, 7), torch.relu, LayerSpec(nn.Linear, 7, 6), LayerSpec(nn.LayerNorm, 6)]
    model = PipelineModule(
        [ends[0], *inner, ends[1]],
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda x, y: (x - y).square().mean(),
    )
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith("1."))
    params = [param for param in model.parameters() if param.requires_grad]
    config = {**config_of(Case(4, 1, "bf16")), "gradient_accumulation_steps": 2}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(params, lr=0.02), config=config)
    data = (torch.arange(24).reshape(2, 2, 6) / (7 + number) for number in range(8))
    batches = ((x.bfloat16(), y.bfloat16()) for x, y in data)
    for _ in range(2):
        engine.train_batch(data_iter=batches)
    engine.save_checkpoint(str(directory), tag="global_step2", client_state={"epoch": 3})
    truth: dict[str, dict[str, torch.Tensor]] = {"fp32": {}, "exp_avg": {}}
    for name, param in model.named_parameters():
        if param.requires_grad:
            truth["fp32"][name] = safe_get_full_fp32_param(param).clone()
            truth["exp_avg"][name] = safe_get_full_optimizer_state(param, "exp_avg").clone()
    if engine.grid.get_data_parallel_id() == 0:
        torch.save(truth, directory / f"truth_of_stage{engine.grid.get_stage_id()}.pth")
    dist.barrier()
    if dist.get_rank() == 0:
        for script in directory.glob("*.py"):
            script.unlink()
        if universal:
            make_universal(directory)
            shutil.rmtree(directory / "global_step2")


def make_universal(directory: Path) -> None:
    """Convert the checkpoint with DeepSpeed's own script."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(directory / "global_step2"),
            output_folder=str(directory / "global_step2_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def run(rank: int, ranks: int, directory: Path, names: list[str]) -> None:
    """Write the checkpoints of this many ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29800 + ranks)}
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
    }
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # for the scripts of releases before torch 2.6
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed

    # Collectives through shared memory: an extension that would be compiled now.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow here, but right
    deepspeed.init_distributed("gloo")
    for name in names:
        if rank == 0:
            print("case", name, flush=True)
            shutil.rmtree(directory / name, ignore_errors=True)
            (directory / name).mkdir(parents=True)
        dist.barrier()
        if name == MMENGINE:
            save_with_mmengine(directory / name)
        elif name in (PIPELINE, UNIVERSAL):
            save_pipeline(directory / name, universal=name == UNIVERSAL)
        else:
            save(CASES[name], directory / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    target, chosen = Path(sys.argv[1]), sys.argv[2:] or [*CASES, MMENGINE, PIPELINE, UNIVERSAL]
    ranks = {MMENGINE: 2, PIPELINE: 4, UNIVERSAL: 4, **{name: case.ranks for name, case in CASES.items()}}
    for count in (1, 2, 4):
        if own := [name for name in chosen if ranks[name] == count]:
            mp.spawn(run, (count, target, own), count)
