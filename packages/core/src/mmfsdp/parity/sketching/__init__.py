"""Sketches of tensors: a few numbers that do not depend on sharding, and that add up over boxes."""
