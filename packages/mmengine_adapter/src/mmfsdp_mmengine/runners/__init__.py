"""The plain Runner with a sharded model, and patches of MMEngine's own functions."""
