"""Writes weights as 8-bit codes with scales beside them."""

__all__: list[str] = []
