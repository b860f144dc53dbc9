"""A sharded model while it trains: its state, hooks, guards, gradients and buffers."""
