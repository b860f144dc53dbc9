"""MMEngine's hooks, adapted to sharded models."""
