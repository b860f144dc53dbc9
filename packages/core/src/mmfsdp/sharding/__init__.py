"""Carrying a plan out: devices, meshes, weights, activation checkpointing and the engines."""
