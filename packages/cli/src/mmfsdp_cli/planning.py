"""``mmfsdp-cli plan``: how a model would be sharded, for any number of ranks, without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.charts import bar_chart
from mmfsdp_cli.console import reporting_errors
from mmfsdp_cli.modelling import key_values, model_of
from mmfsdp_cli.options import PATH, flag, model_arguments, several
from mmfsdp_cli.settings import with_settings

if TYPE_CHECKING:
    import torch.nn as nn

    from mmfsdp import ShardPlan
    from mmfsdp.frontends import ReadConfig
    from mmfsdp.planning import MemoryEstimate
    from mmfsdp.torch_style import Translated

__all__ = ["mesh_of", "plan_command"]


@click.command("plan")
@click.argument("model", help="package.module:factory, or the path of an MMEngine config.")
@click.option("--ranks", metavar="N|RxS", default="8", help="For how many ranks; 2x4 is two replicas of four shards.")
@click.option(
    "--config",
    type=PATH,
    help="Settings as JSON, TOML or YAML. By default those of an MMEngine config, if MODEL is one.",
)
@several("--set", "changes", metavar="PATH=VALUE", help="One setting, such as sharding.strategy=SHARD_GRAD_OP.")
@model_arguments
@click.option(
    "--optimizer",
    metavar="NAME|N",
    help="adamw, sgd-momentum, ...; or how many tensors it keeps per parameter. By default that of a config.",
)
@flag("--tree", help="Show the units as a tree of modules.")
@flag("--chart", help="Show the bytes of units as bars.")
@click.option("--diff", "other", type=PATH, metavar="FILE", help="Show what other settings would change.")
@flag("--json", "as_json", help="Print the plan as JSON.")
def plan_command(
    model: str,
    ranks: str,
    config: Path | None,
    changes: tuple[str, ...],
    model_arguments: tuple[str, ...],
    optimizer: str | None,
    tree: bool,
    chart: bool,
    other: Path | None,
    as_json: bool,
) -> None:
    """Show how a model would be sharded, and the memory of a step. Weights take none here; no process is started.

    Exit codes: 0 done; 2 the model, a setting or the number of ranks is wrong.
    """
    if sum((tree, chart, as_json, other is not None)) > 1:
        raise click.BadParameter("give one of --tree, --chart, --json and --diff")
    if optimizer is not None and (chart or other is not None):
        raise click.BadParameter(
            "not with --chart and --diff, which show no memory of a step", param_hint="--optimizer"
        )
    wanted = key_values(changes, "--set")
    with reporting_errors():
        built, source = model_of(model, model_arguments)
        if optimizer is None and source is not None:
            optimizer = source.optimizer()
        plan = _plan(built, ranks, _settings(built, source, config, wanted))
        if other is not None:
            difference = plan.diff(_plan(built, ranks, _settings(built, None, other, wanted)))
            click.echo(difference or "The plans are the same.")
        elif as_json:
            click.echo(json.dumps({**plan.to_dict(), "memory": _memory(plan, optimizer).describe()}, indent=2))
        elif chart:
            click.echo(bar_chart(plan))
        else:
            click.echo(f"{plan.tree() if tree else plan.table()}\n\n{_memory(plan, optimizer)}")
            if optimizer is None:
                click.echo("\nFor the optimizer's state: --optimizer adamw, sgd-momentum, ...")


def _memory(plan: ShardPlan, optimizer: str | None) -> MemoryEstimate:
    from mmfsdp.planning import estimate_memory

    return estimate_memory(plan, int(optimizer) if optimizer is not None and optimizer.isdecimal() else optimizer)


def mesh_of(ranks: str) -> int | tuple[int, int]:
    """Return the number of ranks that ``8`` stands for, or the (replicate, shard) pair of ``2x4``.

    Raises:
        ConfigError: It is neither.
    """
    from mmfsdp.checkpoint import Ranks

    mesh = Ranks.parse(ranks)
    return (mesh.replicas, mesh.shards) if "x" in ranks else mesh.count


def _settings(model: nn.Module, source: ReadConfig | None, config: Path | None, changes: dict[str, Any]) -> Translated:
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


def _plan(model: nn.Module, ranks: str, means: Translated) -> ShardPlan:
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
