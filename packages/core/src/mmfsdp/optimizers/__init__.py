"""Optimizers that see whole matrices: owners, buckets, two messages."""
