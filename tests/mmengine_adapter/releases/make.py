"""Trains the project with ten releases of MMEngine, and keeps the checkpoint of each, and the config that all wrote.

``python tests/mmengine_adapter/releases/make.py`` installs each release into a folder of its own. What it writes is in
the repository, so that tests need no network: run it again only to add a release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RELEASES = ("0.9.0", "0.9.1", *(f"0.10.{patch}" for patch in range(8)))
TRAIN = """
import sys
sys.modules['transformers'] = None  # its Adafactor has the name of torch's, which old releases cannot tell apart
import mmengine
import project  # Config.fromfile imports custom_imports; a config made here does not
from mmengine.config import Config
from mmengine.runner import Runner

assert mmengine.__version__ == sys.argv[1], mmengine.__version__
Runner.from_cfg(Config(dict(
    custom_imports=dict(imports=['project'], allow_failed_imports=False),
    model=dict(type='TinyModel'),
    work_dir=sys.argv[2],
    train_dataloader=dict(
        batch_size=8, num_workers=0, dataset=dict(type='TinyData'), sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate')),
    train_cfg=dict(by_epoch=True, max_epochs=3),
    optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05), clip_grad=dict(max_norm=0.5)),
    param_scheduler=[dict(type='LinearLR', start_factor=0.5, by_epoch=False, end=4),
                     dict(type='MultiStepLR', milestones=[2], by_epoch=True)],
    custom_hooks=[dict(type='KeepLosses'), dict(type='EMAHook', momentum=0.2)],
    default_hooks=dict(logger=dict(type='LoggerHook', interval=1), checkpoint=dict(type='CheckpointHook', interval=1)),
    randomness=dict(seed=5),
    experiment_name='tiny',
))).train()
"""


def main() -> None:
    """Make what is missing."""
    for release in RELEASES:
        target = HERE / release
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            installed, work = Path(folder, "installed"), Path(folder, "work")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed)]
            subprocess.run([*pip, f"mmengine=={release}"], check=True)
            env = {**os.environ, "PYTHONPATH": f"{installed}:{HERE}", "PYTHONWARNINGS": "ignore"}
            subprocess.run([sys.executable, "-c", TRAIN, release, str(work)], check=True, env=env)
            target.mkdir()
            shutil.copy(work / "epoch_2.pth", target)
            shutil.copy(work / "losses.json", target)
            [config] = work.glob("*.py")
            text = config.read_text().replace(str(work), "work_dirs/tiny")
            if (HERE / "config.py").exists():
                assert (HERE / "config.py").read_text() == text, f"{release} writes another config"
            (HERE / "config.py").write_text(text)
        print(release, flush=True)


if __name__ == "__main__":
    main()
