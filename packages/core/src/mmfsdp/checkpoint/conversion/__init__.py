"""What a conversion takes of a checkpoint, what it calls it, and in which files it will lie."""

__all__: list[str] = []
