"""Makes the plan that the command line describes, and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.settings import with_settings
from mmfsdp_cli.printing.console import say, say_lines, terminal_width

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import ReadConfig
    from mmfsdp.planning import MemoryEstimate
    from mmfsdp.torch_style import Translated

__all__ = ["known_optimizer", "memory_of", "mesh_of", "planned", "print_plan", "say_suggested", "settings_of"]


def planned(model: nn.Module, ranks: str, means: Translated) -> ShardPlan:
    """Return the plan of a model for ranks as text, with settings as they were read."""
    import mmfsdp

    return mmfsdp.plan(
        model,
        means.config,
        mesh_of(ranks),
        policy=means.policy,
        check_fn=means.check_fn,
        ignored_modules=means.ignored_modules,
        ignored_params=means.ignored_params,
    )


def settings_of(
    model: nn.Module, source: ReadConfig | None, config: Path | None, changes: dict[str, Any]
) -> Translated:
    """Return the settings of a file, or else of the model's config, changed at the given paths."""
    from mmfsdp import ShardConfig
    from mmfsdp.torch_style import Translated

    if config is None and source is not None:
        means = source.settings(model)
        if not changes:
            return means
        settings = with_settings(means.config.to_dict(), changes)
        replaced = any(path.split(".")[0] == "wrap" for path in changes)
        return Translated(
            ShardConfig.from_dict(settings),
            None if replaced else means.policy,
            means.param_init_fn,
            means.check_fn,
            means.ignored_modules,
            means.ignored_params,
        )
    from mmfsdp.config import read_settings

    return Translated(ShardConfig.from_dict(with_settings({} if config is None else read_settings(config), changes)))


def mesh_of(ranks: str) -> int | tuple[int, int] | dict[str, int]:
    """Return the number of ranks that ``8`` stands for, the (replicate, shard) pair of ``2x4``, or named axes.

    Raises:
        ConfigError: It is none of these.
    """
    from mmfsdp.checkpoint import Ranks

    if "=" in ranks:
        pairs = [part.partition("=") for part in ranks.split(",")]
        sizes = {axis.strip(): int(size) for axis, _, size in pairs if size.strip().isdecimal()}
        if len(sizes) == len(pairs):
            return sizes
        raise click.BadParameter(
            f"{ranks!r} does not give each axis once, with a number. Write replicate=2,shard=4,tensor=2.",
            param_hint="--ranks",
        )
    mesh = Ranks.parse(ranks)
    return (mesh.replicas, mesh.shards) if "x" in ranks else mesh.count


def memory_of(plan: ShardPlan, optimizer: str | None) -> MemoryEstimate:
    """Return the bytes of a step without activations; the optimizer is a name, or a number of tensors as text."""
    from mmfsdp.planning import estimate_memory

    return estimate_memory(plan, int(optimizer) if optimizer is not None and optimizer.isdecimal() else optimizer)


def known_optimizer(optimizer: object) -> str | None:
    """Return the optimizer if `memory_of` knows its name."""
    from mmfsdp.planning import OPTIMIZERS

    return optimizer if isinstance(optimizer, str) and optimizer.lower() in OPTIMIZERS else None


def say_suggested(model: str) -> None:
    """Print that the settings are those that doctor suggests, because a config shards nothing."""
    say(f"{model} shards nothing. With the advice of 'mmfsdp-cli doctor', and with --set if given:\n")


def print_plan(plan: ShardPlan, *, tree: bool = False, every_unit: bool = False, limit: int = 0) -> None:
    """Print a plan as a table or tree that fits the terminal.

    Args:
        plan: The plan.
        tree: Print a tree.
        every_unit: Show each unit; by default equal layers share a row.
        limit: Rows to show; 0 shows all.
    """
    shown = plan.tree(every_unit=every_unit) if tree else plan.table(every_unit=every_unit, width=terminal_width())
    head, body, end = (part.splitlines() for part in (*shown.split("\n\n", 2), "", "")[:3])
    titles = 0 if tree else 2  # the titles of the table and a rule
    rows = body[titles:]
    say("\n".join(head), bold=True)
    say("")
    say("\n".join(body[:titles]), bold=True) if titles else None
    say_lines(rows, limit)
    say("\n" + "\n".join(end))
