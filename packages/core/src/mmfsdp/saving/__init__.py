"""Ranks and files together: saving and loading the checkpoints of a sharded model."""
