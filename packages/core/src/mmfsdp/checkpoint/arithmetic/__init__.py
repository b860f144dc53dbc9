"""Arithmetic on checkpoints: averages, merged adapters and differences, computed while they are written."""

__all__: list[str] = []
