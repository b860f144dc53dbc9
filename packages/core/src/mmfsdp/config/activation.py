"""The settings of activation checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import BeforeValidator, PositiveInt

from mmfsdp.config.base import ConfigModel
from mmfsdp.config.fields import Names, Reference, as_mapping, is_word, one_of
from mmfsdp.config.wrap import Wrap

if TYPE_CHECKING:
    from mmfsdp.config.written import ActivationCheckpointingSettings

__all__ = ["ActivationCheckpointing", "ActivationCheckpointingConfig"]

_read_mode = one_of("full", "every_n", "selective", "ops")
_Mode = Annotated[Literal["full", "every_n", "selective", "ops"], BeforeValidator(_read_mode)]


class ActivationCheckpointingConfig(ConfigModel):
    """Section ``activation_checkpointing``: recompute activations in backward, which saves their memory."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ActivationCheckpointingSettings]) -> None: ...

    mode: _Mode = "full"
    """``full``: every shard unit below the root (or what ``modules`` selects). ``every_n``: each n-th of those.
    ``selective``: what ``modules`` or ``check_fn`` selects. ``ops``: as ``full``, but for results of ``save_ops``."""
    n: PositiveInt = 2
    """For ``every_n``: 2 recomputes every second module."""
    modules: Wrap | None = None
    """Policy that selects modules. Default: the shard units below the root."""
    check_fn: Reference | None = None
    """Reference to a function ``(module) -> bool`` that selects modules."""
    save_ops: Names = ()
    """For ``ops``: operators whose results are kept, such as ``'aten.mm'``. Empty: the usual expensive ones."""
    offload: bool = False
    """Move kept activations to CPU memory until backward."""
    preserve_rng_state: bool = True
    """Recompute dropout with the masks of the first forward. False is faster, but only right without randomness."""
    use_reentrant: bool = False
    """Use torch's older implementation; for ``full``, ``every_n`` and ``selective`` only."""
    early_stop: bool = True
    """Stop recomputing as soon as all needed tensors exist."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare the metadata of recomputed tensors with the first forward."""

    def check_together(self) -> None:
        """Raise for settings that contradict each other.

        Raises:
            ValueError: They do; validation turns it into a `ConfigError`.
        """
        if self.modules is not None and self.check_fn is not None:
            raise ValueError("both modules and check_fn select what to checkpoint. Give one.")
        if self.save_ops and self.mode != "ops":
            raise ValueError(
                f"save_ops is only used in mode 'ops', not {self.mode!r}. Set mode 'ops', or remove save_ops."
            )
        if self.use_reentrant and (self.mode == "ops" or self.offload):
            wish = "mode 'ops'" if self.mode == "ops" else "offload"
            raise ValueError(f"use_reentrant=True cannot be combined with {wish}. Set use_reentrant to False.")


def _switch(value: Any) -> Any:
    """Read true as the defaults, and false as None."""
    return ({} if value else None) if isinstance(value, bool) else value


ActivationCheckpointing = Annotated[
    ActivationCheckpointingConfig | None,
    as_mapping(
        "mode", _read_mode, is_word, expected="true, a mode", schema=ActivationCheckpointingConfig | _Mode | bool | None
    ),
    BeforeValidator(_switch, json_schema_input_type=ActivationCheckpointingConfig | _Mode | bool | None),
]
