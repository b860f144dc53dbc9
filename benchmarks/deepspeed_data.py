"""Writes files laid out as DeepSpeed's of four ranks, with AdamW's moments.

They hold what DeepSpeed's ``zero_to_fp32.py`` and mmfsdp read; writing them with DeepSpeed itself needs gradients, too.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

RANKS, SIDE = 4, 2048


def write(stage: int, path: Path, nbytes: int, side: int = SIDE) -> None:
    """Write a checkpoint of stage 2 or 3, of square matrices."""
    shapes = OrderedDict(
        (f"layers.{i}.weight", torch.Size((side, side))) for i in range(max(1, nbytes // side**2 // 4))
    )
    folder = path / "global_step1"
    folder.mkdir(parents=True)
    (path / "latest").write_text(folder.name)
    share = sum(shape.numel() for shape in shapes.values()) // RANKS
    empty = torch.zeros(0, dtype=torch.bfloat16)
    module = {name: empty if stage == 3 else torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, "global_steps": 1}
    for rank in range(RANKS):
        torch.manual_seed(rank)
        flat, moments = torch.randn(share), {key: torch.randn(share) for key in ("exp_avg", "exp_avg_sq")}
        wrapped = {"state": {0: {"step": 1, **moments}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": RANKS}
        state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = [flat]
        state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = wrapped
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage != 3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
