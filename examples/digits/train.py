"""Trains a config with MMEngine's FlexibleRunner; the same for sharded and unsharded runs."""

from __future__ import annotations

import argparse

from mmengine.config import Config, DictAction
from mmengine.runner._flexible_runner import FlexibleRunner

__all__ = ["main"]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the work directory")
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="end early, to be resumed")
    parser.add_argument("--cfg-options", nargs="+", action=DictAction, default={}, help="settings to replace")
    arguments = parser.parse_args()

    config = Config.fromfile(arguments.config)
    config.merge_from_dict(arguments.cfg_options)
    config.work_dir = arguments.work_dir
    config.resume = arguments.resume
    if arguments.stop_after is not None:
        config.custom_hooks.append(dict(type="StopAfter", epochs=arguments.stop_after))
    FlexibleRunner.from_cfg(config).train()


if __name__ == "__main__":
    main()
