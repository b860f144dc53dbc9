"""`diagnose()`: collects all findings about an MMEngine config, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.nn as nn
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

from mmfsdp import ShardPlan, plan
from mmfsdp.errors import MmfsdpError
from mmfsdp.frontends import LEVELS, Diagnosis, Finding
from mmfsdp.planning import estimate_memory
from mmfsdp.torch_style import Translated
from mmfsdp_mmengine.doctor import models, optimizer_findings, running, schedule_findings, sharding, state
from mmfsdp_mmengine.doctor.config_models import build_model, sharding_settings
from mmfsdp_mmengine.doctor.subject import Subject, class_of, in_scope, sharding_of
from mmfsdp_mmengine.optimizers.binding import with_optimizers
from mmfsdp_mmengine.optimizers.muon import MuonConstructor

__all__ = ["FINDINGS", "RANKS", "diagnose"]

RANKS = 8
"""The number of ranks to plan for by default."""

FINDINGS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    *running.FINDINGS,
    *sharding.FINDINGS,
    *models.FINDINGS,
    *optimizer_findings.FINDINGS,
    *schedule_findings.FINDINGS,
    *state.FINDINGS,
)
"""All functions from a subject to findings, in the order in which they run."""


def diagnose(
    path: str,
    settings: dict[str, Any],
    mesh: int | tuple[int, int] | None = None,
    written: Mapping[str, Any] | None = None,
    inherited: frozenset[str] = frozenset(),
) -> Diagnosis:
    """Return the diagnosis of a config; names are looked up in its scope. Not collective; needs no device.

    Args:
        path: The config file, for the report.
        settings: The content of the config. Not changed.
        mesh: The number of ranks to plan for, or (replicate, shard). Default: the config's ``device_mesh``, else 8.
        written: See `Subject`.
        inherited: See `Subject`.
    """
    with in_scope(settings):
        return _diagnose(path, settings, mesh, written, inherited)


def _diagnose(
    path: str,
    settings: dict[str, Any],
    mesh: int | tuple[int, int] | None,
    written: Mapping[str, Any] | None,
    inherited: frozenset[str],
) -> Diagnosis:
    model: nn.Module | None = None
    failed: list[Finding] = []
    try:
        model = build_model(settings)
    except MmfsdpError as error:
        failed.append(Finding("error", str(error.context.get("config", "model")), error.message))
    whole, refused = _plan(settings, model, mesh)
    if model is not None and whole is not None:
        whole = _with_muon(whole, settings, model)
    subject = Subject(settings, sharding_of(settings), model, whole, written, inherited)
    found = [item for look in FINDINGS for item in look(subject)]
    if not any(item.level == "error" and item.path == "default_scope" for item in found):  # else it says why
        found = failed + found
    if refused is not None:
        path_of_it = sharding.setting_of(subject, refused)
        if not any(item.level == "error" and item.path.startswith(path_of_it) for item in found):
            found.append(Finding("error", path_of_it, refused.message))
    found = sorted(dict.fromkeys(found), key=lambda item: LEVELS.index(item.level))
    memory = None if whole is None else estimate_memory(whole, optimizer_findings.optimizer_of(settings))
    return Diagnosis(path, tuple(found), whole, subject.sharding is None and whole is not None, memory)


def _plan(
    settings: dict[str, Any], model: nn.Module | None, mesh: int | tuple[int, int] | None
) -> tuple[ShardPlan | None, MmfsdpError | None]:
    """Return the plan of the config, or of the advised config, or the error that prevents a plan."""
    if model is None:
        return None, None
    try:
        means = sharding_settings(settings, model)
        planned = plan(
            model,
            means.config,
            _mesh(settings, means, mesh),
            policy=means.policy,
            check_fn=means.check_fn,
            ignored_modules=means.ignored_modules,
            ignored_params=means.ignored_params,
        )
    except MmfsdpError as error:
        return None, error
    return planned, None


def _with_muon(whole: ShardPlan, settings: Mapping[str, Any], model: nn.Module) -> ShardPlan:
    """Return the plan with what Muon and AdamW update, if the config trains with them."""
    given = settings.get("optim_wrapper")
    constructor = given.get("constructor") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or class_of(constructor, OPTIM_WRAPPER_CONSTRUCTORS) is not MuonConstructor:
        return whole
    try:
        return with_optimizers(whole, optimizer_findings.build_on(model, given))
    except Exception:  # a finding says why it cannot be built
        return whole


def _mesh(settings: dict[str, Any], means: Translated, given: int | tuple[int, int] | None) -> int | tuple[int, int]:
    found = sharding_of(settings)
    mesh = found.arguments.get("device_mesh") if found is not None else None
    shape = mesh.get("mesh_shape") if isinstance(mesh, dict) else None
    if given is None and shape is not None:
        return tuple(shape) if isinstance(shape, list | tuple) else shape
    ranks = RANKS if given is None else given
    hybrid = "HYBRID" in means.config.sharding.strategy and means.config.sharding.shard_size is None
    return (1, ranks) if hybrid and isinstance(ranks, int) else ranks  # one machine
