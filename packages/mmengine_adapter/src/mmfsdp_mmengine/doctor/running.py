"""Findings about imports, the runner and the strategy, and configs that shard nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from mmengine.registry import MODEL_WRAPPERS, STRATEGIES

from mmfsdp.errors import closest
from mmfsdp.frontends import Finding
from mmfsdp_mmengine.configs.others import OTHER_MODEL_WRAPPERS, OTHER_OPTIM_WRAPPERS, OTHER_STRATEGIES
from mmfsdp_mmengine.doctor.advice import advised_wrapper
from mmfsdp_mmengine.doctor.other_strategies import optim_wrapper_of_others, wrapper_of_others
from mmfsdp_mmengine.doctor.pasting import changed_lines, extended_imports, replaced_line
from mmfsdp_mmengine.doctor.subject import Subject, class_of, name_of, types_in, unregistered

__all__ = ["FINDINGS", "parameters_of"]


def not_imported(subject: Subject) -> Iterator[Finding]:
    """The import of this package is missing, may fail silently, or comes too late."""
    if subject.sharding is None or subject.written is not None:
        return
    given = subject.settings.get("custom_imports") or {}
    imports = given.get("imports") or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    if "mmfsdp_mmengine" not in imports:
        yield Finding(
            "error",
            "custom_imports.imports",
            "mmfsdp_mmengine is not imported, so training uses MMEngine's own classes.",
            advice=extended_imports(subject.settings),
        )
    elif imports[0] != "mmfsdp_mmengine":
        yield Finding(
            "warning",
            "custom_imports.imports",
            "classes in modules before it that derive from MMEngine's, such as hooks from EMAHook, derive from the "
            "stock classes. Put mmfsdp_mmengine first.",
            advice=extended_imports(subject.settings),
        )
    if given.get("allow_failed_imports"):
        yield Finding(
            "warning",
            "custom_imports.allow_failed_imports",
            "if the package is not installed, training silently uses MMEngine's own classes.",
            advice=extended_imports(subject.settings),
        )


def stock_classes(subject: Subject) -> Iterator[Finding]:
    """A config in Python style does not import this package, because MMEngine ignores its ``custom_imports``."""
    if subject.sharding is None or subject.written is None:
        return
    types = dict(types_in(subject.written, ""))
    if any(str(value).partition(".")[0] == "mmfsdp_mmengine" for value in types.values()):
        return
    path = "strategy.type" if subject.sharding.strategy else "model_wrapper_cfg.type"
    name = name_of(types[path])
    yield Finding(
        "error",
        path,
        "MMEngine ignores custom_imports in configs that import modules. This config imports nothing of "
        "mmfsdp_mmengine, so training uses MMEngine's own classes.",
        advice=f"from mmfsdp_mmengine import {name}\n{path.partition('.')[0]}.update(type={name})",
    )


def nothing_sharded(subject: Subject) -> Iterator[Finding]:
    """The config trains with DDP, in one process, or with another strategy."""
    if subject.sharding is not None:
        return
    strategy = subject.settings.get("strategy") or {}
    path = "strategy.type" if strategy else "strategy"
    if strategy and class_of(strategy.get("type"), STRATEGIES) is None:
        return  # `unknown_names` reports it
    if name_of(strategy.get("type")) in OTHER_STRATEGIES:
        here = f"{name_of(strategy['type'])} is not changed and not checked. To shard with mmfsdp instead, write what "
        here += "follows; it says the same of precision, clipping, accumulation and offloading."
    else:
        here = "nothing is sharded: every rank holds the whole model, as with DDP. To shard it:"
    yield Finding("warning", path, here, advice="\n".join(advised_strategy(subject)))


def advised_strategy(subject: Subject) -> list[str]:
    """Return the config lines that shard the model."""
    wrapper = {**advised_wrapper(subject.model), **wrapper_of_others(subject.settings)}
    first = extended_imports(subject.settings)
    strategy = replaced_line(subject, "strategy", {"type": "FSDPStrategy", "model_wrapper": wrapper})
    if subject.written is not None:  # MMEngine ignores custom_imports in a config that imports modules
        first = "from mmfsdp_mmengine import FSDPStrategy"
        strategy = strategy.replace("'FSDPStrategy'", "FSDPStrategy", 1)
    lines = [first, "runner_type = 'FlexibleRunner'", strategy]
    if changes := optim_wrapper_of_others(subject):
        lines.append(changed_lines(subject, "optim_wrapper", changes))
    if subject.settings.get("model_wrapper_cfg") is not None:  # of the plain Runner
        lines.append("model_wrapper_cfg = None")
    return lines


def of_other_strategies(subject: Subject) -> Iterator[Finding]:
    """Classes for DeepSpeed and ColossalAI that a config keeps after its strategy has changed."""
    if subject.sharding is None:
        return
    given = subject.settings.get("optim_wrapper")
    if isinstance(given, Mapping) and (name := name_of(given.get("type"))) in OTHER_OPTIM_WRAPPERS:
        yield Finding(
            "error",
            "optim_wrapper.type",
            f"{name} works with {name.removesuffix('OptimWrapper')}Strategy only.",
            advice=changed_lines(subject, "optim_wrapper", {"type": "OptimWrapper"}),
        )
    if name_of(subject.argument("type")) in OTHER_MODEL_WRAPPERS:
        yield Finding(
            "error",
            f"{subject.sharding.path}.type",
            f"{name_of(subject.argument('type'))} does not shard, and works with its own strategy only.",
            advice=changed_lines(subject, subject.sharding.path, {"type": "MMFullyShardedDataParallel"}),
        )


def unknown_names(subject: Subject) -> Iterator[Finding]:
    """The config names a strategy or wrapper that no registry has."""
    for path, registry in (("strategy", STRATEGIES), ("model_wrapper_cfg", MODEL_WRAPPERS)):
        given = subject.settings.get(path)
        wanted = [(f"{path}.type", given, registry)] if isinstance(given, Mapping) else []
        if path == "strategy" and isinstance(given, Mapping) and isinstance(given.get("model_wrapper"), Mapping):
            wanted.append(("strategy.model_wrapper.type", given["model_wrapper"], MODEL_WRAPPERS))
        for where, config, known in wanted:
            yield from unregistered(config.get("type"), known, where)


def unknown_arguments(subject: Subject) -> Iterator[Finding]:
    """The config gives a strategy or the DDP wrapper an unknown argument."""
    for path, registry in (("strategy", STRATEGIES), ("model_wrapper_cfg", MODEL_WRAPPERS)):
        given = subject.settings.get(path)
        cls = class_of(given.get("type"), registry) if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(cls, type):
            continue
        if subject.sharding is not None and path == subject.sharding.path:
            continue  # translating its arguments reports it
        known = parameters_of(cls)
        for name in given:
            if name != "type" and name not in known:
                yield Finding(
                    "error", f"{path}.{name}", f"{cls.__name__} has no argument {name!r}.{closest(name, known)}"
                )


def parameters_of(cls: type) -> list[str]:
    """Return the names of arguments that a class accepts, including those that it passes on to its bases."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        # The class itself provides arguments that a base requires and the class does not have.
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
            "shards the model right before training, after its weights are initialised; all ranks gather checkpoints.",
            "weights were initialised and broadcast after wrapping, and only the first rank gathered checkpoints.",
        )
        if settings.get("launcher", "none") == "none":
            yield Finding(
                "warning",
                "launcher",
                "with launcher 'none' the plain Runner ignores model_wrapper_cfg and trains unsharded. Start with "
                "--launcher pytorch, or set it here.",
                advice="launcher = 'pytorch'",
            )
        return
    if kind != "FlexibleRunner":
        yield Finding(
            "warning",
            "runner_type",
            "OpenMMLab's tools/train.py uses the plain Runner by default, which ignores strategy.",
            advice="runner_type = 'FlexibleRunner'",
        )
    if isinstance(settings.get("model_wrapper_cfg"), Mapping):
        yield Finding(
            "warning",
            "model_wrapper_cfg",
            "FlexibleRunner uses strategy and ignores this, and the plain Runner does the opposite. Remove one.",
        )
    if "env_cfg" not in settings:
        yield Finding("changed", "env_cfg", "is optional.", "FlexibleRunner.from_cfg failed without it.")
    if settings.get("compile"):
        yield Finding("changed", "compile", "the sharded model is compiled.", "from_cfg did not pass it on.")


def for_replicas(subject: Subject) -> Iterator[Finding]:
    """``find_unused_parameters`` at the top, which the plain Runner gives to DDP."""
    if subject.sharding is not None and subject.settings.get("find_unused_parameters"):
        yield Finding(
            "changed",
            "find_unused_parameters",
            "is not needed: parameters that a step does not use may differ from step to step and from rank to rank.",
            "ignored it where the model is sharded.",
        )


FINDINGS = (
    not_imported,
    stock_classes,
    nothing_sharded,
    of_other_strategies,
    unknown_names,
    unknown_arguments,
    runner_kind,
    for_replicas,
)
"""All findings of this module."""
