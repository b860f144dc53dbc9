"""Reports mistakes in settings by the names of FullyShardedDataParallel's arguments, from which they were made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mmfsdp.errors import ConfigError

__all__ = ["in_words_of_torch"]

_ARGUMENTS = {
    "sharding.strategy": "sharding_strategy",
    "sharding.use_orig_params": "use_orig_params",
    "sharding.limit_all_gathers": "limit_all_gathers",
    "sharding.ignored_modules": "ignored_modules",
    "sharding.ignored_parameters": "ignored_states",
    "prefetch.backward": "backward_prefetch",
    "prefetch.forward": "forward_prefetch",
    "init.sync_states": "sync_module_states",
    "init.param_init_fn": "param_init_fn",
    "init.device": "device_id",
    "cpu_offload.enabled": "cpu_offload.offload_params",
    "precision.preset": "mixed_precision",
    "precision.ignore_classes": "mixed_precision._module_classes_to_ignore",
    "precision": "mixed_precision",
    "wrap": "auto_wrap_policy",
    "sharding": "sharding_strategy",
}
"""Arguments by the paths of the settings that they become; the longest path comes first."""
_NAMES = "|".join(map(re.escape, _ARGUMENTS))
_TYPED = re.compile(rf"\bShardConfig\.({_NAMES})\b")
_DOTTED = re.compile(rf"(?<![\w.'\"])({'|'.join(re.escape(path) for path in _ARGUMENTS if '.' in path)})\b")
_PREFIX = re.compile(r"\bShardConfig[.:] ?")


@contextmanager
def in_words_of_torch() -> Iterator[None]:
    """Raise a ConfigError again with the names of arguments in place of the paths of settings."""
    try:
        yield
    except ConfigError as error:
        path = str(error.context.get("config", ""))
        message = _PREFIX.sub("", _DOTTED.sub(_argument, _TYPED.sub(_argument, error.message)))
        context = {**error.context, "config": re.sub(rf"^({_NAMES})\b", _argument, path)}
        raise type(error)(message, **context) from None


def _argument(match: re.Match[str]) -> str:
    return _ARGUMENTS[match[1]]
