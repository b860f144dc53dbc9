"""Ranks and files together: saving and loading the checkpoints of a sharded model."""

from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)
