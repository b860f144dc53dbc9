"""Findings about the arguments of the wrapper and the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.nn as nn

from mmfsdp import ShardPlan
from mmfsdp.errors import MmfsdpError
from mmfsdp.frontends import Finding
from mmfsdp.torch_style import ARGUMENTS, translate_arguments
from mmfsdp_mmengine.configs.arguments import activation_arguments, state_dict_settings, wrapper_arguments
from mmfsdp_mmengine.doctor.advice import advised_wrapper
from mmfsdp_mmengine.doctor.config_models import OWN_ARGUMENTS
from mmfsdp_mmengine.doctor.pasting import changed_lines
from mmfsdp_mmengine.doctor.subject import Subject, name_of

__all__ = ["FINDINGS", "setting_of"]

_SETTINGS = {"strategy": "sharding_strategy", "shard_size": "sharding_strategy", "wrap": "auto_wrap_policy"}


def setting_of(subject: Subject, error: MmfsdpError) -> str:
    """Return the path of the MMEngine setting for an error that names a setting of core."""
    path = subject.sharding.path if subject.sharding is not None else "model"
    named = str(error.context.get("config", "")).removeprefix("model_wrapper.").removeprefix("strategy.")
    if named.startswith("activation_checkpointing") and subject.argument("activation_checkpointing") is None:
        return f"strategy.{named}"
    for part in reversed(named.split(".")):
        if part in _SETTINGS or part in ARGUMENTS:
            named = _SETTINGS.get(part, part)
            break
    return f"{path}.{named}".rstrip(".")


def wrong_arguments(subject: Subject) -> Iterator[Finding]:
    """Arguments that the wrapper rejects, one by one."""
    if subject.sharding is None:
        return
    for name, value in subject.sharding.arguments.items():
        own = name in OWN_ARGUMENTS and name not in ARGUMENTS
        if own or name in ("module", "process_group", "device_mesh"):
            continue
        try:
            translate_arguments(**wrapper_arguments(subject.model or nn.Module(), **{name: value}))
        except MmfsdpError as error:
            if subject.model is not None or name != "auto_wrap_policy":
                yield Finding("error", f"{subject.sharding.path}.{name}", error.message)
    recompute = partial(activation_arguments, module=subject.model or nn.Module())
    for name, check in (("activation_checkpointing", recompute), ("state_dict_cfg", state_dict_settings)):
        if name in subject.sharding.strategy:
            try:
                check(subject.sharding.strategy[name])
            except MmfsdpError as error:
                yield Finding("error", f"strategy.{error.context.get('config', name)}", error.message)


def strategy_words(subject: Subject) -> Iterator[Finding]:
    """NO_SHARD, and hybrid sharding without the number of ranks that shard together."""
    if subject.sharding is None or (given := subject.argument("sharding_strategy")) is None:
        return
    path, word = f"{subject.sharding.path}.sharding_strategy", name_of(getattr(given, "name", given)).upper()
    meshed = subject.argument("device_mesh") is not None or subject.argument("process_group") is not None
    if word == "NO_SHARD":
        yield Finding(
            "changed",
            path,
            "uses engine 'replicate'; gradients are averaged.",
            "used FSDP1 units that hold whole weights.",
        )
    elif "HYBRID" in word and not meshed:
        mesh = {} if subject.plan is None else {"device_mesh": _mesh(subject.plan)}
        yield Finding(
            "warning",
            path,
            "the LOCAL_WORLD_SIZE ranks of a machine shard together; without that variable this is an error. "
            "device_mesh works with any launcher.",
            "ranks on the CPU were silently not synchronised at all.",
            changed_lines(subject, subject.sharding.path, mesh),
        )


def no_policy(subject: Subject) -> Iterator[Finding]:
    """The whole model is one unit."""
    given = [subject.argument(name) for name in ("auto_wrap_policy", "fsdp_auto_wrap_policy", "config")]
    if subject.sharding is None or subject.model is None or any(item is not None for item in given):
        return
    advice = changed_lines(subject, subject.sharding.path, advised_wrapper(subject.model))
    yield Finding(
        "warning",
        f"{subject.sharding.path}.auto_wrap_policy",
        "without a policy the whole model is one shard unit, and every rank gathers all of it at once.",
        "did the same.",
        advice,
    )


def words_of_arguments(subject: Subject) -> Iterator[Finding]:
    """Forms of arguments that MMEngine's wrapper changed, misread or rejected."""
    if subject.sharding is None:
        return
    path = subject.sharding.path
    for name in ("mixed_precision", "auto_wrap_policy", "param_init_fn", "process_group"):
        if isinstance(subject.argument(name), Mapping) and not _is_policy_of_names(subject.argument(name)):
            yield Finding(
                "changed",
                f"{path}.{name}",
                "the dict is copied.",
                "removed its entries, and a second build from the config failed.",
            )
    policy = subject.argument("auto_wrap_policy")
    if isinstance(policy, Mapping) and _is_policy_of_names(policy):
        yield Finding(
            "changed",
            f"{path}.auto_wrap_policy",
            "CustomPolicy and module classes by name are accepted.",
            "rejected CustomPolicy and classes by name.",
        )
    for name in ("ignored_modules", "ignored_parameters", "ignored_states"):
        if subject.argument(name):
            yield Finding(
                "changed",
                f"{path}.{name}",
                "names and patterns are accepted; gradients are averaged over ranks.",
                "failed on names, and did not average gradients: each rank trained these parameters on its own.",
            )
    if subject.argument("fsdp_auto_wrap_policy") is not None:
        yield Finding("ok", f"{path}.fsdp_auto_wrap_policy", "torch 1.11's name of auto_wrap_policy is accepted.")
    if subject.argument("use_orig_params") is False:
        yield Finding(
            "warning",
            f"{path}.use_orig_params",
            "uses engine 'fsdp1' with one flat parameter per unit, which has one set of optimizer settings.",
            "silently applied weight decay and learning rates of single parameters to whole units.",
            changed_lines(subject, path, {"use_orig_params": True}),
        )


def recomputing(subject: Subject) -> Iterator[Finding]:
    """Activation checkpointing keeps parameter names."""
    if subject.sharding is None:
        return
    for path, value in (
        ("strategy.activation_checkpointing", subject.sharding.strategy.get("activation_checkpointing")),
        (f"{subject.sharding.path}.activation_checkpointing", subject.argument("activation_checkpointing")),
    ):
        if value is not None:
            yield Finding(
                "changed",
                path,
                "parameters keep their names, check_fn accepts arguments, and there are more modes, such as 'ops'.",
                "renamed parameters (_checkpoint_wrapped_module), which broke paramwise_cfg and checkpoints, and gave "
                "check_fn as a dict wrong arguments.",
            )


def sync_bn(subject: Subject) -> Iterator[Finding]:
    """The strategy's and the plain Runner's ``sync_bn``."""
    if subject.sharding is None:
        return
    settings = subject.sharding.strategy if subject.sharding.strategy else subject.settings
    if settings.get("sync_bn") is not None:
        path = "strategy.sync_bn" if subject.sharding.strategy else "sync_bn"
        yield Finding("changed", path, "batch norm layers are converted.", "FSDPStrategy ignored it.")


def without_memory(subject: Subject) -> Iterator[Finding]:
    """``skip_init_weights`` needs the weights of a checkpoint."""
    if subject.sharding is None or not subject.sharding.strategy.get("skip_init_weights"):
        return
    if not subject.settings.get("load_from") and not subject.settings.get("resume"):
        yield Finding(
            "error",
            "strategy.skip_init_weights",
            "training without load_from or resume is an error: nothing gives the parameters their values.",
            "ran init_weights anyway.",
            changed_lines(subject, "strategy", {"skip_init_weights": False}),
        )
        return
    yield Finding(
        "changed",
        "strategy.skip_init_weights",
        "needs no memory for parameters; buffers have their values.",
        "ran init_weights anyway, failed on models that read tensors while building, and left garbage in buffers.",
    )


def two_places(subject: Subject) -> Iterator[Finding]:
    """Activation checkpointing is set in the strategy and in its wrapper."""
    name = "activation_checkpointing"
    if subject.sharding is None or not subject.sharding.strategy:
        return
    if subject.sharding.strategy.get(name) is not None and subject.argument(name) is not None:
        yield Finding("error", f"strategy.{name}", "is set in model_wrapper too. Set it in one of them.")


def _mesh(plan: ShardPlan) -> dict[str, Any]:
    """Return the mesh of the plan's ranks as the wrapper's argument."""
    shape, names = (plan.mesh.replicate, plan.mesh.shard), ("replicate", "shard")
    return {"mesh_shape": shape, "mesh_dim_names": names}


def _is_policy_of_names(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    classes = value.get("module_classes") or value.get("transformer_layer_cls") or ()
    named = isinstance(classes, str) or any(isinstance(item, str) for item in classes)
    return named or name_of(value.get("type")) == "CustomPolicy"


FINDINGS = (
    wrong_arguments,
    strategy_words,
    no_policy,
    words_of_arguments,
    recomputing,
    sync_bn,
    without_memory,
    two_places,
)
"""All findings of this module."""
