"""Makes the checkpoints beside it with torch's own functions, so that tests read real files where torch is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).parent


def main() -> None:
    """Write them again: ``python tests/cli/golden/make.py``."""
    tree = {
        "state_dict": {"backbone.conv": torch.arange(6.0).view(2, 3), "head": torch.zeros(4, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]},
        "meta": {"epoch": 3},
    }
    torch.save(tree, HERE / "epoch_3.pth")
    shutil.rmtree(HERE / "dcp", ignore_errors=True)
    content = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}
    dcp.save(content, checkpoint_id=HERE / "dcp", no_dist=True)


if __name__ == "__main__":
    main()
