"""Activation checkpointing: recomputes activations in backward instead of keeping them."""

from mmfsdp.sharding.activation.checkpointing import apply_activation_checkpointing
from mmfsdp.sharding.activation.kept_operators import DEFAULT_SAVE_OPS

__all__ = ["DEFAULT_SAVE_OPS", "apply_activation_checkpointing"]
