"""Names of MMEngine's classes for DeepSpeed and ColossalAI, which work with their own strategies only."""

from __future__ import annotations

from typing import Any

from mmfsdp.errors import ConfigError

__all__ = ["OTHER_MODEL_WRAPPERS", "OTHER_OPTIM_WRAPPERS", "OTHER_STRATEGIES", "check_optim_wrapper"]

OTHER_STRATEGIES = ("DeepSpeedStrategy", "ColossalAIStrategy")
OTHER_MODEL_WRAPPERS = ("MMDeepSpeedEngineWrapper", "ColossalAIModelWrapper")
OTHER_OPTIM_WRAPPERS = ("DeepSpeedOptimWrapper", "ColossalAIOptimWrapper")


def check_optim_wrapper(wrapper: Any, config: str = "optim_wrapper") -> None:
    """Raise if an optimizer wrapper can only be used by the strategy of another library.

    Args:
        wrapper: The wrapper, built.
        config: Its dotted path.

    Raises:
        ConfigError: It is DeepSpeed's or ColossalAI's.
    """
    names = [cls.__name__ for cls in type(wrapper).__mro__]
    if (name := next((name for name in OTHER_OPTIM_WRAPPERS if name in names), None)) is not None:
        raise ConfigError(
            f"{name} works with {name.removesuffix('OptimWrapper')}Strategy only. With FSDPStrategy write "
            "type='OptimWrapper', or 'AmpOptimWrapper' for float16, and say clip_grad and accumulative_counts there.",
            config=f"{config}.type",
        )
