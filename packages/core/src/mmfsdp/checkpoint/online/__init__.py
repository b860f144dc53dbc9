"""What the ranks of a training do to save and load a checkpoint together. All of it imports torch."""

__all__: list[str] = []
