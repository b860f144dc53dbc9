"""Calls of parts of a sharded model, from inside and outside of the forward of their unit."""
