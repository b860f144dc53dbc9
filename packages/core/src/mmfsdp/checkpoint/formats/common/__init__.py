"""Holds what all formats have in common: their base class, their input, and hints for files of other frameworks."""

__all__: list[str] = []
