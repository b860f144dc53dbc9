"""MMEngine's hooks, for sharded models."""
