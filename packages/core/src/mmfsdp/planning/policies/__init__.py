"""Wrapping policies: which modules become shard units."""
