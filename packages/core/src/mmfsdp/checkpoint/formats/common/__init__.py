"""What all formats have in common: the base of a format, what it is given, and what other frameworks write."""

__all__: list[str] = []
