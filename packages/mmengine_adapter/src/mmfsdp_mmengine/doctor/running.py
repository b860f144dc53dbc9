"""Findings about how training is started: imports, runner, strategy, nothing sharded at all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import torch.nn as nn
from mmengine.registry import MODEL_WRAPPERS, STRATEGIES

from mmfsdp.errors import closest
from mmfsdp.frontends import Finding
from mmfsdp.planning import repeated_classes
from mmfsdp_mmengine.doctor.subject import Subject, class_of, name_of

__all__ = ["FINDINGS", "IMPORT_LINE", "advised_wrapper", "parameters_of"]

IMPORT_LINE = "custom_imports = dict(imports=['mmfsdp_mmengine'], allow_failed_imports=False)"
_OURS = ("FSDPStrategy", "MMFullyShardedDataParallel", "MMDistributedDataParallel", "AmpOptimWrapper", "EMAHook")


def not_imported(subject: Subject) -> Iterator[Finding]:
    """The one line is missing, may fail in silence, or comes too late."""
    if subject.sharding is None:
        return
    given = subject.settings.get("custom_imports") or {}
    imports = given.get("imports") or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    if "mmfsdp_mmengine" not in imports:
        both = ["mmfsdp_mmengine", *imports]
        yield Finding(
            "error",
            "custom_imports.imports",
            "nothing of this package is used unless it is imported: the stock classes are trained with.",
            advice=f"custom_imports = dict(imports={both!r}, allow_failed_imports=False)",
        )
    elif imports[0] != "mmfsdp_mmengine":
        yield Finding(
            "warning",
            "custom_imports.imports",
            "classes that modules before it derive from MMEngine's, such as hooks from EMAHook, derive from the stock "
            "ones. Put it first.",
            advice=f"imports={['mmfsdp_mmengine', *(name for name in imports if name != 'mmfsdp_mmengine')]!r}",
        )
    if given.get("allow_failed_imports"):
        yield Finding(
            "warning",
            "custom_imports.allow_failed_imports",
            "where the package is not installed, the stock classes train without a word.",
            advice="allow_failed_imports=False",
        )


def stock_classes(subject: Subject) -> Iterator[Finding]:
    """A config in Python style names stock classes as objects, which no registry replaces."""

    def walk(value: object, path: str) -> Iterator[Finding]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(item, type) and item.__module__.startswith("mmengine.") and item.__name__ in _OURS:
                    yield Finding(
                        "error",
                        f"{path}.{key}",
                        f"this is MMEngine's own {item.__name__}: only names are looked up in registries.",
                        advice=f"{key}='{item.__name__}'",
                    )
                yield from walk(item, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from walk(item, f"{path}[{index}]")

    for key in ("strategy", "model_wrapper_cfg", "optim_wrapper", "custom_hooks", "default_hooks"):
        yield from walk(subject.settings.get(key), key)


def nothing_sharded(subject: Subject) -> Iterator[Finding]:
    """The config trains with DDP, in one process, or with a strategy that is not ours."""
    if subject.sharding is not None:
        return
    strategy = subject.settings.get("strategy") or {}
    path = "strategy.type" if strategy else "strategy"
    if strategy and class_of(strategy.get("type"), STRATEGIES) is None:
        return  # told by `unknown_names`
    if name_of(strategy.get("type")) in ("DeepSpeedStrategy", "ColossalAIStrategy"):
        here = f"{name_of(strategy['type'])} is left as it is; nothing here is about it. To shard with mmfsdp:"
    else:
        here = "nothing is sharded: every rank holds the whole model, as with DDP. To shard:"
    yield Finding("warning", path, here, advice="\n".join([IMPORT_LINE, *advised_strategy(subject)]))


def advised_strategy(subject: Subject) -> list[str]:
    """Return lines of a config that shard the model of this one."""
    wrapper = ", ".join(f"{key}={value!r}" for key, value in advised_wrapper(subject.model).items())
    return ["runner_type = 'FlexibleRunner'", f"strategy = dict(type='FSDPStrategy', model_wrapper=dict({wrapper}))"]


def advised_wrapper(model: nn.Module | None) -> dict[str, object]:
    """Return arguments of a wrapper whose units are the model's repeated blocks."""
    classes = [] if model is None else repeated_classes(model)
    policy: dict[str, object] = {"type": "ModuleWrapPolicy", "module_classes": classes}
    return {"auto_wrap_policy": policy if classes else {"type": "size_based_auto_wrap_policy"}}


def unknown_names(subject: Subject) -> Iterator[Finding]:
    """A strategy or wrapper is named that no registry has."""
    for path, registry in (("strategy", STRATEGIES), ("model_wrapper_cfg", MODEL_WRAPPERS)):
        given = subject.settings.get(path)
        wanted = [(f"{path}.type", given, registry)] if isinstance(given, Mapping) else []
        if path == "strategy" and isinstance(given, Mapping) and isinstance(given.get("model_wrapper"), Mapping):
            wanted.append(("strategy.model_wrapper.type", given["model_wrapper"], MODEL_WRAPPERS))
        for where, config, place in wanted:
            kind = config.get("type")
            if isinstance(kind, str) and class_of(kind, place) is None:
                hint = closest(name_of(kind), place.module_dict)
                yield Finding("error", where, f"{kind!r} is not registered.{hint}")


def unknown_arguments(subject: Subject) -> Iterator[Finding]:
    """A strategy or the DDP wrapper is given an argument that it does not have."""
    for path, registry in (("strategy", STRATEGIES), ("model_wrapper_cfg", MODEL_WRAPPERS)):
        given = subject.settings.get(path)
        cls = class_of(given.get("type"), registry) if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(cls, type):
            continue
        if subject.sharding is not None and path == subject.sharding.path:
            continue  # told by what builds its arguments
        known = parameters_of(cls)
        for name in given:
            if name != "type" and name not in known:
                yield Finding(
                    "error", f"{path}.{name}", f"{cls.__name__} has no argument {name!r}.{closest(name, known)}"
                )


def parameters_of(cls: type) -> list[str]:
    """Return the names of arguments that a class takes, those that it passes on to its bases included."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        # What a base needs, and the class does not ask for, the class gives itself.
        given = [item for item in parameters if base is cls or item.default is not inspect.Parameter.empty]
        names += [item.name for item in given if item.kind in kinds and item.name not in (*names, "self")]
        if all(item.kind is not inspect.Parameter.VAR_KEYWORD for item in parameters):
            break
    return names


def runner_kind(subject: Subject) -> Iterator[Finding]:
    """Strategies belong to FlexibleRunner, model_wrapper_cfg to the plain Runner."""
    settings = subject.settings
    kind = name_of(settings.get("runner_type") or "")
    if subject.sharding is None:
        return
    if subject.sharding.path == "model_wrapper_cfg":
        yield Finding(
            "changed",
            "model_wrapper_cfg",
            "the model is sharded right before training, after weights are initialised; all ranks gather checkpoints.",
            "weights were initialised and broadcast after wrapping, and only the first rank gathered checkpoints.",
        )
        if settings.get("launcher", "none") == "none":
            yield Finding(
                "warning",
                "launcher",
                "with 'none' the plain Runner ignores model_wrapper_cfg and trains unsharded. Start with "
                "--launcher pytorch, or write it.",
                advice="launcher = 'pytorch'",
            )
        return
    if kind != "FlexibleRunner":
        yield Finding(
            "warning",
            "runner_type",
            "OpenMMLab's tools/train.py starts the plain Runner unless this says otherwise, and that ignores strategy.",
            advice="runner_type = 'FlexibleRunner'",
        )
    if isinstance(settings.get("model_wrapper_cfg"), Mapping):
        yield Finding(
            "warning",
            "model_wrapper_cfg",
            "strategy is for FlexibleRunner, model_wrapper_cfg for the plain Runner; the other is ignored. Drop one.",
        )
    if "env_cfg" not in settings:
        yield Finding("changed", "env_cfg", "may be left out.", "FlexibleRunner.from_cfg failed without it.")
    if settings.get("compile"):
        yield Finding("changed", "compile", "the sharded model is compiled.", "from_cfg did not pass it on.")


FINDINGS = (not_imported, stock_classes, nothing_sharded, unknown_names, unknown_arguments, runner_kind)
"""What is looked for here."""
