"""For people who come from torch's FullyShardedDataParallel: its arguments, and a wrapper that takes them."""

from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)
