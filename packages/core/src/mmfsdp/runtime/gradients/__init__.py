"""Gradients of a sharded model: what backward reaches, completing and clipping them."""
