"""Weights as codes of 8 bits with scales beside them, as they are written."""

__all__: list[str] = []
