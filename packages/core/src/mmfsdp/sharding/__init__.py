"""Carrying a plan out: devices, meshes, weights, activation checkpointing and the engines."""

from mmfsdp.basics.torch_version import require_torch

require_torch(__name__)
