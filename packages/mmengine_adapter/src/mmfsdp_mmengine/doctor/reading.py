"""Reads MMEngine configs for core's frontends: the model without memory, the sharding, a diagnosis."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch.nn as nn
from mmengine.config import Config
from mmengine.utils import import_modules_from_strings

from mmfsdp.errors import ConfigError
from mmfsdp.frontends import Diagnosis, TrainingStep
from mmfsdp.torch_style import Translated
from mmfsdp_mmengine.configs.arguments import plain
from mmfsdp_mmengine.configs.packages import shipped_config, what_to_install
from mmfsdp_mmengine.doctor.config_models import build_model, sharding_settings
from mmfsdp_mmengine.doctor.diagnosing import diagnose
from mmfsdp_mmengine.doctor.optimizer_findings import optimizer_of
from mmfsdp_mmengine.doctor.stepping import training_step
from mmfsdp_mmengine.doctor.subject import in_scope, sharding_of

__all__ = ["MMEngineConfig", "open_config"]


def open_config(path: Path) -> MMEngineConfig:
    """Read a config; see `mmfsdp.frontends.read_config`."""
    return MMEngineConfig(path)


class MMEngineConfig:
    """An MMEngine config; only its imports are executed.

    Args:
        path: The config file.

    Raises:
        ConfigError: The file cannot be read, or a module of ``custom_imports`` cannot be imported.

    Attributes:
        content: The config as plain dicts and lists.
        written: See `mmfsdp_mmengine.doctor.subject.Subject`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # The modules are imported below, because MMEngine does not report why an import failed.
            config = Config.fromfile(self.path, import_custom_modules=False)
            written = config.to_dict()  # without the names that a config in Python style imports
            self.content: dict[str, Any] = plain({key: value for key, value in config.items() if key in written})
            self.written = written if Config._is_lazy_import(str(self.path)) else None
        except Exception as error:  # a config is a program
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            advice = what_to_install(error) or _without_base(error, self.path)
            text = f"{self.path.name} cannot be read: {reason}. {advice}".rstrip()
            raise ConfigError(text, file=str(path)) from error
        _import(self.content.get("custom_imports"), self.path.name)

    def model(self) -> nn.Module:
        """Return its model with parameters on the meta device; see `mmfsdp.frontends.ReadConfig`."""
        return build_model(self.content)

    def settings(self, model: nn.Module) -> Translated:
        """Return how it shards its model; see `mmfsdp.frontends.ReadConfig`."""
        return sharding_settings(self.content, model)

    def optimizer(self) -> str | None:
        """Return the name of its optimizer; see `mmfsdp.frontends.ReadConfig`."""
        return optimizer_of(self.content)

    def shards(self) -> bool:
        """Return whether it shards its model; see `mmfsdp.frontends.ReadConfig`."""
        with in_scope(self.content):
            return sharding_of(self.content) is not None

    def step(self, model: nn.Module, batch_size: int | None = None) -> TrainingStep:
        """Return its step of training; see `mmfsdp.frontends.ReadConfig`."""
        return training_step(self.content, model, batch_size)

    def diagnose(self, mesh: int | tuple[int, int] | None) -> Diagnosis:
        """Return its diagnosis; see `mmfsdp.frontends.ReadConfig`."""
        inherited = frozenset() if self.written is not None else frozenset(self.content) - _assigned(self.path)
        return diagnose(str(self.path), self.content, mesh, self.written, inherited)


def _without_base(error: Exception, path: Path) -> str:
    """Return what to write where a config was copied out of a package, without the files that it begins with."""
    base = shipped_config(path.name) if isinstance(error, FileNotFoundError) and path.exists() else None
    if base is None:
        return ""
    return f"A config finds the files of its _base_ beside itself. In a config of your own, write: _base_ = {base!r}"


def _assigned(path: Path) -> frozenset[str]:
    """Return the names that a config in Python assigns itself; no names for other files, which have no statements."""
    if path.suffix != ".py":
        return frozenset()
    targets = [
        target
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    ]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))


def _import(given: Any, name: str) -> None:
    """Import what ``custom_imports`` lists, if the config has it."""
    if given is None:
        return
    if not isinstance(given, dict) or not {"imports"} <= {*given} <= {"imports", "allow_failed_imports"}:
        raise ConfigError(
            f"custom_imports of {name} is {given!r}. Write custom_imports = dict(imports=['package.module'], "
            "allow_failed_imports=False).",
            config="custom_imports",
        )
    try:
        import_modules_from_strings(**given)
    except Exception as error:
        reason = error.__cause__ or error.__context__ or error  # MMEngine's own error only names the module
        raise ConfigError(
            f"A module in custom_imports of {name} cannot be imported: {error} ({type(reason).__name__}: {reason}). "
            f"{what_to_install(reason) or 'Correct its name, or the module.'}",
            config="custom_imports",
        ) from error
