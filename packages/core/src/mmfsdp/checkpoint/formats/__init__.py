"""The formats of checkpoints on disk: one module per format reads it into a ``Layout`` or writes it."""

__all__: list[str] = []
