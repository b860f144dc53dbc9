"""Tensors without memory, and a world of ranks without processes."""
