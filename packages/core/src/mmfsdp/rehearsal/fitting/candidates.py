"""Lists the settings that a config leaves open, and what a search may choose for them. Pure and torch-free."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, closest

__all__ = ["Choice", "choices_for", "plain_settings", "with_offload"]

_VARIED = ("sharding", "wrap", "precision", "activation_checkpointing", "prefetch")
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # The fastest first.
    "precision": ("bf16", "fp32"),
    "activation_checkpointing": (None, {"mode": "ops"}, {"mode": "every_n", "n": 2}, {"mode": "full"}),
    "prefetch": ({},),
}
_EMPTY: tuple[Any, ...] = (None, {})


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train: settings, the micro-batches that a step is divided into, and when gradients are reduced."""

    settings: Mapping[str, Any]
    accumulate: int
    reduces: bool = False
    """Whether gradients are reduced with every micro-batch, and not only with the last one."""

    @property
    def key(self) -> str:
        """Text that is equal for equal choices only."""
        return f"{self.loop} {_text(self.settings)}"

    @property
    def loop(self) -> str:
        """What the training loop does."""
        return f"{self.accumulate}{' reduced' * self.reduces}"

    @property
    def forward_key(self) -> str:
        """Text that is equal for choices that compute the same in forward and backward."""
        return f"{self.loop} {self.forward_settings}"

    @property
    def forward_settings(self) -> str:
        """The same, whatever the number of micro-batches."""
        return _text({name: value for name, value in self.settings.items() if name not in ("sharding", "wrap")})

    @property
    def kept_settings(self) -> str:
        """The same, whatever is recomputed: equal for choices whose gradients have equal sizes."""
        apart = ("sharding", "wrap", "activation_checkpointing")
        return _text({name: value for name, value in self.settings.items() if name not in apart})

    @property
    def plan_key(self) -> str:
        """Text that is equal for choices whose plans have equal units."""
        apart = ("activation_checkpointing", "prefetch")
        return _text({name: value for name, value in self.settings.items() if name not in apart})

    @property
    def modules_key(self) -> str:
        """Text that is equal for choices with equal units, whose modules recompute equal activations."""
        return _text({name: self.settings.get(name) for name in ("wrap", "activation_checkpointing")})

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Smaller for choices with fewer settings, fewer micro-batches and shorter values."""
        return len(self.settings), self.accumulate + self.reduces, len(_text(self.settings))


def choices_for(
    given: Mapping[str, Any],
    ranks: int,
    samples: int,
    *,
    outside: Sequence[str] = (),
    ranks_per_node: int = 8,
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> Iterator[Choice]:
    """Yield every combination of what a search may choose; what the user's config states stays as it is.

    Args:
        given: The user's settings.
        ranks: Number of ranks.
        samples: Size of the first dimension of the batch; micro-batches divide it by powers of two, or have one each.
        outside: Large modules that the wrap policy leaves in the root unit.
        ranks_per_node: Ranks that share a node; shard groups are a part of a node or whole nodes.
        choices: For a section of settings, and for ``accumulate``, the values to try instead of the usual ones.

    Raises:
        ConfigError: ``choices`` names something else, a section that the config states, or no values; or there is no
            shard group of `HYBRID_SHARD` for that many ranks.
    """
    choices = dict(choices or {})
    config = ShardConfig.from_dict(given)
    _check(choices, config)
    options: dict[str, Sequence[Any]] = {}
    for name in _VARIED:
        if name in choices:
            options[name] = choices[name]
        elif name == "sharding":
            options[name] = [*_shardings(config, ranks, ranks_per_node)]
        elif name == "wrap":
            options[name] = [*_wraps(config, given, outside)]
        elif name not in config.model_fields_set:
            options[name] = _DEFAULTS[name]
    accumulates = choices.get("accumulate") or [*_divisions(samples)]
    for values in itertools.product(*options.values()):
        chosen = {name: value for name, value in zip(options, values, strict=True) if value not in _EMPTY}
        settings = {**given, **chosen}
        if "wrap" in chosen and "wrap" not in choices and not _gathers(settings, ranks):
            continue  # units change nothing
        for accumulate in accumulates:
            yield Choice(settings, accumulate)
            if accumulate > 1 and _gathers(settings, ranks):
                yield Choice(settings, accumulate, reduces=True)


def with_offload(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield the choices that shard over all ranks, or leave that to the default, with shards in CPU memory."""
    for choice in choices:
        config = ShardConfig.from_dict(choice.settings)
        if config.sharding.strategy == "FULL_SHARD" and config.engine in ("auto", "fsdp2"):
            yield replace(choice, settings={**choice.settings, "cpu_offload": {"enabled": True}})


def plain_settings(config: ShardConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings as plain data; sections that are plain already, as the user wrote them."""
    if config is None:
        return {}
    checked = config if isinstance(config, ShardConfig) else ShardConfig.from_dict(config)
    dumped = checked.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, ShardConfig):
        return dumped
    return {name: value if _is_plain(value) else dumped[name] for name, value in config.items()}


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _gathers(settings: Mapping[str, Any], ranks: int) -> bool:
    config = ShardConfig.from_dict(settings)
    return ranks > 1 and config.engine != "replicate" and config.sharding.strategy != "NO_SHARD"


def _check(choices: Mapping[str, Sequence[Any]], config: ShardConfig) -> None:
    for name, values in choices.items():
        if name not in (*_VARIED, "accumulate"):
            known = (*_VARIED, "accumulate")
            raise ConfigError(
                f"choices: {name!r} is not searched.{closest(name, known) or ' Accepted: ' + ', '.join(known) + '.'}",
                config="choices",
            )
        if name in config.model_fields_set:
            raise ConfigError(
                f"choices: the config states {name} already. Remove it from the config, or from choices.",
                config="choices",
            )
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(
                f"choices: {name} is a list of the values to try, at least one, got {values!r}.", config="choices"
            )
    for count in choices.get("accumulate", ()):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"choices: accumulate lists numbers of micro-batches, each at least 1, got {count!r}.", config="choices"
            )


def _shardings(config: ShardConfig, ranks: int, ranks_per_node: int) -> Iterator[Any]:
    """Yield sections ``sharding`` for what the config leaves open of the strategy."""
    stated = config.sharding.model_dump(mode="json", exclude_unset=True)
    hybrid = "HYBRID" in config.sharding.strategy
    if "strategy" in stated and (not hybrid or "shard_size" in stated):
        yield stated if "sharding" in config.model_fields_set else None
        return
    if config.engine == "replicate":
        yield stated or None
        return
    node = min(ranks, ranks_per_node)
    sizes = [size for size in range(2, ranks) if ranks % size == 0 and (size % node == 0 or node % size == 0)]
    if "strategy" in stated:
        if not sizes:
            raise ConfigError(
                f"sharding: {config.sharding.strategy} needs shard groups that divide {ranks} ranks and are a part of "
                f"a node of {node} or whole nodes, and there are none. Use another number of ranks, or FULL_SHARD.",
                config="sharding",
            )
        yield from ({**stated, "shard_size": size} for size in sizes)
        return
    plain = ["FULL_SHARD"]
    if config.sharding.reshard_after_forward is None:
        plain.append("SHARD_GRAD_OP")
    for strategy in plain if ranks > 1 else plain[:1]:
        yield {**stated, "strategy": strategy}
    for strategy, size in itertools.product(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"][: len(plain)], sizes):
        yield {**stated, "strategy": strategy, "shard_size": size}
    if ranks > 1 and not stated:
        yield {"strategy": "NO_SHARD"}


def _wraps(config: ShardConfig, given: Mapping[str, Any], outside: Sequence[str]) -> Iterator[Any]:
    """Yield sections ``wrap``: as it is, and with large modules outside of the blocks as units of their own."""
    yield given.get("wrap")
    if outside and "wrap" not in config.model_fields_set:
        yield {"kind": "any_of", "policies": ["auto", {"kind": "module_name", "patterns": [*outside]}]}


def _divisions(samples: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, as long as they divide the samples, and at last the number of samples."""
    count = 1
    while samples % count == 0 and count <= max(samples, 1):
        yield count
        count *= 2
    if samples & (samples - 1):  # not a power of two
        yield samples
