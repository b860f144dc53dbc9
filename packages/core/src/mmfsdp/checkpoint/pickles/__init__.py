"""Pickles, read without importing or running what they name, and written without torch."""

__all__: list[str] = []
