"""Configs of training frameworks: installed readers are found by entry points, so that nobody here knows them."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp.frontends.findings import Diagnosis
    from mmfsdp.torch_style.arguments import Translated

__all__ = ["GROUP", "ReadConfig", "read_config"]

GROUP = "mmfsdp.config_readers"
"""Group of entry points. Each is named by a file suffix without its dot and is a function from a path to a
`ReadConfig`."""


class ReadConfig(Protocol):
    """A config that was read. Nothing here is collective or needs a device."""

    def model(self) -> nn.Module:
        """Return its model with parameters on the meta device.

        Raises:
            ConfigError: It cannot be built; the context has the setting.
        """

    def settings(self, model: nn.Module) -> Translated:
        """Return how it says that its model is sharded.

        Args:
            model: What `model` returned: named classes are looked up in it.

        Raises:
            ConfigError: A setting is wrong; the context has it.
        """

    def optimizer(self) -> str | None:
        """Return the name of its optimizer in `mmfsdp.planning.OPTIMIZERS`; None if it has none there."""

    def diagnose(self, mesh: int | tuple[int, int] | None) -> Diagnosis:
        """Return what there is to know about it.

        Args:
            mesh: For how many ranks to plan, or (replicate, shard) of them; None for 8, or what the config says.
        """


def read_config(path: str | Path) -> ReadConfig:
    """Read a config with the installed reader of its suffix.

    Raises:
        ConfigError: There is no such file, no reader of such files, or it cannot be read.
    """
    path = Path(path)
    found = [point for point in entry_points(group=GROUP) if point.name == path.suffix.removeprefix(".")]
    if not path.is_file():
        raise ConfigError(
            f"There is no config {str(path)!r}. Write the path of a config, or a factory as 'package.module:factory'."
        )
    if not found:
        raise ConfigError(
            f"Nothing that is installed reads {path.suffix or path.name!r} configs. For those of MMEngine: "
            "pip install mmfsdp-mmengine."
        )
    try:
        reader = found[0].load()
    except ModuleNotFoundError as error:
        package = found[0].dist.name if found[0].dist else "mmfsdp-mmengine"
        raise ConfigError(
            f"Reading {path.suffix} configs needs {error.name}, which is not installed. Install it with: "
            f"pip install {package}"
        ) from None
    config: ReadConfig = reader(path)
    return config
