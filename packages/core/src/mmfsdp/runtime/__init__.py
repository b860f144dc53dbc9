"""A sharded model while it trains: its state, hooks, guards, gradients and buffers."""

from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)
