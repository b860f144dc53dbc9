"""MMEngine configs read for what they say: their model without memory, their sharding, a diagnosis."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

from mmfsdp.compat import ARGUMENTS, Translated, translate_arguments
from mmfsdp.errors import ConfigError, closest
from mmfsdp.findings import Diagnosis
from mmfsdp.meta import parameters_on_meta
from mmfsdp_mmengine.config import activation_arguments, plain, wrapper_arguments
from mmfsdp_mmengine.doctor.subject import names_in, sharding_of
from mmfsdp_mmengine.wrapper import MMFullyShardedDataParallel

__all__ = ["MMEngineConfig", "build_model", "open_config", "sharding_settings"]

OWN_ARGUMENTS = (*inspect.signature(MMFullyShardedDataParallel.__init__).parameters, "type")
"""What the wrapper takes besides core's arguments; and the type itself."""


def open_config(path: Path) -> MMEngineConfig:
    """Read a config; see `mmfsdp.readers`."""
    return MMEngineConfig(path)


class MMEngineConfig:
    """An MMEngine config that was read; nothing of it is run but its imports.

    Args:
        path: Its file.

    Raises:
        ConfigError: It cannot be read, or a module of its ``custom_imports`` cannot be imported.

    Attributes:
        content: What it says, as plain dicts and lists.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # Importing is left to ourselves: MMEngine says only that it failed.
            config = Config.fromfile(self.path, import_custom_modules=False)
            self.content: dict[str, Any] = plain(dict(config.items()))
        except Exception as error:  # a config is a program
            raise ConfigError(
                f"{self.path.name} cannot be read: {type(error).__name__}: {error}", file=str(path)
            ) from error
        try:
            import_modules_from_strings(**self.content.get("custom_imports") or {})
        except Exception as error:
            raise ConfigError(
                f"A module that {self.path.name} imports cannot be: {type(error).__name__}: {error}",
                config="custom_imports",
            ) from error

    def model(self) -> nn.Module:
        """Return its model with parameters on the meta device; see `mmfsdp.readers.ReadConfig`."""
        return build_model(self.content)

    def settings(self, model: nn.Module) -> Translated:
        """Return how it says that its model is sharded; see `mmfsdp.readers.ReadConfig`."""
        return sharding_settings(self.content, model)

    def diagnose(self, mesh: int | tuple[int, int] | None) -> Diagnosis:
        """Return what there is to know about it; see `mmfsdp.readers.ReadConfig`."""
        from mmfsdp_mmengine.doctor.diagnosing import diagnose

        return diagnose(str(self.path), self.content, mesh)


def build_model(settings: dict[str, Any]) -> nn.Module:
    """Build a config's model with its parameters on the meta device.

    Raises:
        ConfigError: It cannot be built; a name that no registry has is told with the nearest ones.
    """
    if not isinstance(settings.get("model"), dict):
        raise ConfigError("The config has no model.", config="model")
    try:
        with DefaultScope.overwrite_default_scope(settings.get("default_scope")), parameters_on_meta():
            model: nn.Module = MODELS.build(plain(settings["model"]))
    except Exception as error:  # whatever the user's model raises
        reason = f"{type(error).__name__}: {error}"
        for path, name in names_in(settings["model"], "model"):
            if isinstance(error, KeyError) and f"{name} is not in the " in str(error):
                known = [key for place in (MODELS, *MODELS.children.values()) for key in place.module_dict]
                raise ConfigError(
                    f"No model is registered as {name!r}.{closest(name, known)} Put the module that defines it into "
                    "custom_imports, or install its package.",
                    config=path,
                ) from error
        raise ConfigError(f"The model cannot be built: {reason}", config="model") from error
    return model


def sharding_settings(settings: dict[str, Any], model: nn.Module) -> Translated:
    """Return how a config says that its model is sharded; without a mesh, and without groups of processes.

    Raises:
        ConfigError: An argument is unknown or has a value that is not accepted.
    """
    found = sharding_of(settings)
    given = dict(found.arguments) if found is not None else {}
    for name in ("module", "process_group", "device_mesh"):
        given.pop(name, None)
    given = {key: value for key, value in given.items() if key in ARGUMENTS or key not in OWN_ARGUMENTS}
    recompute = found.strategy.get("activation_checkpointing") if found is not None else None
    if recompute is not None:
        given["activation_checkpointing"] = activation_arguments(recompute)
    with DefaultScope.overwrite_default_scope(settings.get("default_scope")):
        return translate_arguments(**wrapper_arguments(model, **given))
