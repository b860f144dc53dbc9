"""Writes a checkpoint with Composer's own Trainer on the CPU, and the live weights and optimizer state beside it.

    pip install torch==2.13.0 && pip install --no-deps composer==0.32.1
    pip install coolname tabulate torch-optimizer 'torchmetrics<2' apache-libcloud importlib-metadata py-cpuinfo
    python tests/core/composer/make.py DIRECTORY

Composer asks for older releases of torch, and imports packages that this script does without.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

NOT_NEEDED = ("mcli", "pynvml", "torchvision")


class Absent:
    """Stands in for packages that are imported and not used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] in NOT_NEEDED:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __spec__=spec, __path__=[], __version__="0.20")

    def exec_module(self, module: Any) -> None:
        pass


def main(directory: Path) -> None:
    """Train for a step, with a checkpoint after it."""
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    from composer import Trainer
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, batch: Any) -> Any:
            return self.down(self.up(batch[0]).relu())

        def loss(self, outputs: Any, batch: Any) -> Any:
            return (outputs - batch[1]).square().sum()

    torch.manual_seed(0)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.randn(4, 5), torch.randn(4, 3))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        max_duration="1ba",
        save_folder=str(directory),
        save_interval="1ba",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    (directory / "latest-rank0.pt").unlink()
    full = {"model": trainer.state.model.state_dict(), "optimizer": trainer.state.optimizers[0].state_dict()}
    torch.save(full, directory / "full.pth")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
