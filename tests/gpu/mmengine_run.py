"""Trains the adapter's toy model with a strategy, as a program of its own, and prints what was logged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tests.mmengine_adapter.toy import UNSHARDED, strategy, train

if __name__ == "__main__":
    folder, name, precision = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    changes = {"strategy": UNSHARDED if name == "unsharded" else strategy(engine=name)}
    if precision != "fp32":
        changes["optim_wrapper"] = {
            "type": "AmpOptimWrapper",
            "dtype": precision,
            "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.05},
            "clip_grad": {"max_norm": 0.5},
        }
    found = train(0, Path(folder), 1, changes)
    print(json.dumps(found))
