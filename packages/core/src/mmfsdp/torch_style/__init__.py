"""For people who come from torch's FullyShardedDataParallel: its arguments, and a wrapper that takes them."""
