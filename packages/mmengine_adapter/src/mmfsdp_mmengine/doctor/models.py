"""Findings about the model: what the plan decided about it, and how stock MMEngine behaved differently."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from mmfsdp.basics import name_list
from mmfsdp.frontends import Finding
from mmfsdp_mmengine.doctor.pasting import changed_lines, extended_hooks
from mmfsdp_mmengine.doctor.subject import Subject, hooks_of, name_of
from mmfsdp_mmengine.wrappers.forward_steps import overrides

__all__ = ["FINDINGS"]

_STOCK = {
    "tied": "size errors in forward.",
    "scalar": "raised an error.",
    "other": "size errors in forward.",
}


def notes_of_the_plan(subject: Subject) -> Iterator[Finding]:
    """Decisions of the plan that the config does not state: ties, containers, scalars, modules that are not called."""
    merged: dict[tuple[str, str], list[str]] = {}
    notes = subject.plan.notes if subject.plan is not None else ()
    for note in (note for note in notes if note.kind != "buffers"):  # see batch_norm
        merged.setdefault((note.kind, note.text), []).extend(note.fqns)
    for (kind, text), fqns in merged.items():
        path = "model" if fqns else (subject.sharding.path if subject.sharding is not None else "model")
        names = name_list(fqns, 3, quoted=False)
        yield Finding("changed", path, f"{names}: {text}" if names else text, _STOCK.get(kind, ""))


def frozen(subject: Subject) -> Iterator[Finding]:
    """Frozen parameters, also in units with trained ones."""
    plan = subject.plan
    if plan is None or subject.sharding is None:
        return
    mixed = [unit for unit in plan.units if len({param.requires_grad for param in unit.params}) == 2]
    fixed = sum(param.numel for param in plan.all_params() if not param.requires_grad)
    if fixed:
        yield Finding(
            "ok",
            "model",
            f"{fixed:,} of {plan.param_numel:,} parameters are frozen: sharded, without gradients or optimizer state"
            + (f"; {len(mixed)} units have both kinds." if mixed else "."),
            "raised an error with use_orig_params=False.",
        )


def batch_norm(subject: Subject) -> Iterator[Finding]:
    """Batch norm in low precision, and statistics that differ between ranks."""
    model, plan = subject.model, subject.plan
    if model is None or subject.sharding is None:
        return
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    full = [unit for unit in plan.units if unit.precision.full_precision] if plan is not None else []
    if full:
        yield Finding(
            "changed",
            f"{subject.sharding.path}.mixed_precision",
            f"{len(full)} units, such as {full[0].fqn!r}, compute in float32, because running statistics need it.",
            "batch norm kept its dtype only with a wrapping policy.",
        )
    elif plan is not None and any(unit.precision.param_dtype for unit in plan.units):
        yield Finding(
            "warning",
            f"{subject.sharding.path}.mixed_precision",
            f"batch norm ({norms[0]!r}) runs in low precision: running statistics lose small updates.",
            advice=changed_lines(
                subject, f"{subject.sharding.path}.mixed_precision", {}, ["_module_classes_to_ignore", "ignore_classes"]
            ),
        )
    settings = subject.sharding.strategy if subject.sharding.strategy else subject.settings
    alone = [name for name in norms if not isinstance(model.get_submodule(name), SyncBatchNorm)]
    averaged = any(name_of(hook.get("type")) == "SyncBuffersHook" for _, hook, _ in hooks_of(subject.settings))
    if (
        alone
        and not averaged
        and not subject.argument("broadcast_buffers")
        and settings.get("sync_bn") in (None, "revert")
    ):
        yield Finding(
            "warning",
            "model",
            f"{len(alone)} batch norm layers, such as {alone[0]!r}, have different statistics on each rank. "
            "A checkpoint has those of the first rank.",
            "the same.",
            f"{extended_hooks(subject, 'SyncBuffersHook')}  # or sync_bn='torch', or broadcast_buffers=True",
        )


def own_steps(subject: Subject) -> Iterator[Finding]:
    """Training and validation steps that the model overrides."""
    if subject.model is None or subject.sharding is None:
        return
    own = [step for step in ("train_step", "val_step", "test_step") if overrides(subject.model, step)]
    if own:
        yield Finding(
            "changed",
            "model",
            f"{type(subject.model).__name__}'s own {', '.join(own)} {'is' if len(own) == 1 else 'are'} called, and "
            "forwards inside use the sharded modules.",
            "ignored them, or failed.",
        )


FINDINGS = (notes_of_the_plan, frozen, batch_norm, own_steps)
"""All findings of this module."""
