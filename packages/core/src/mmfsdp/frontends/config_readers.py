"""Reads configs of training frameworks with installed readers, which are found by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmfsdp.basics.installing import pip_install
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.frontends.findings import Diagnosis
    from mmfsdp.rehearsal.running.training_step import TrainingStep
    from mmfsdp.torch_style.arguments import Translated

__all__ = ["GROUP", "ReadConfig", "read_config"]

GROUP = "mmfsdp.config_readers"
"""The group of entry points. Each has the name of a file suffix without its dot, and is a function that takes a path
and returns a `ReadConfig`."""


class ReadConfig(Protocol):
    """A config that was read. No method is collective or needs a device."""

    def model(self) -> nn.Module:
        """Return the config's model with parameters on the meta device.

        Raises:
            ConfigError: The model cannot be built; the context names the setting.
        """

    def settings(self, model: nn.Module) -> Translated:
        """Return the config's settings for sharding, or, if it shards nothing, the settings that `diagnose` advises.

        Args:
            model: The result of `model`; named classes are looked up in it.

        Raises:
            ConfigError: A setting is wrong; the context names it.
        """

    def shards(self) -> bool:
        """Return whether the config itself shards its model."""

    def optimizer(self) -> str | None:
        """Return the name of the config's optimizer in `mmfsdp.planning.OPTIMIZERS`; None if it is not there."""

    def step(self, model: nn.Module, batch_size: int | None = None) -> TrainingStep:
        """Return the config's step of training, for a rehearsal: its batch, loss, optimizer and clipping.

        Args:
            model: The result of `model`.
            batch_size: The samples of one rank; None for the config's own number.

        Raises:
            ConfigError: The config does not describe a step that can be rehearsed; the context names the setting.
        """

    def diagnose(self, mesh: int | tuple[int, int] | None) -> Diagnosis:
        """Return the diagnosis of the config.

        Args:
            mesh: The number of ranks to plan for, or (replicate, shard); None for the config's own number, or 8.
        """


def is_readable(path: str | Path) -> bool:
    """Return whether a file has the suffix of a config: of an installed reader, or of one that there may be."""
    suffix = Path(path).suffix.removeprefix(".")
    return suffix in ("py", "toml", "yaml", "yml") or any(point.name == suffix for point in entry_points(group=GROUP))


def read_config(path: str | Path) -> ReadConfig:
    """Read a config with the installed reader of its suffix.

    Raises:
        ConfigError: The file does not exist, no installed reader reads such files, or the file cannot be read.
    """
    path = Path(path)
    found = [point for point in entry_points(group=GROUP) if point.name == path.suffix.removeprefix(".")]
    if not path.is_file():
        raise ConfigError(
            f"There is no config {str(path)!r}. Write the path of a config, or a factory as 'package.module:factory'."
        )
    if not found:
        raise ConfigError(
            f"No installed package reads {path.suffix or path.name!r} configs. For MMEngine's configs: "
            f"{pip_install('mmfsdp[torch]', 'mmfsdp-mmengine[mmengine]')}"
        )
    try:
        reader = found[0].load()
    except ModuleNotFoundError as error:
        package = found[0].dist.name if found[0].dist else "mmfsdp-mmengine"
        raise ConfigError(
            f"Reading {path.suffix} configs needs {error.name}, which is not installed. Install it with: "
            f"{pip_install(package)}"
        ) from None
    config: ReadConfig = reader(path)
    return config
