"""Copies bytes of files to others in constant memory, checks them, and publishes files complete or not at all."""

__all__: list[str] = []
