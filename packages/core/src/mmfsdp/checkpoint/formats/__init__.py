"""One module per format on disk: each reads it into a ``Layout``, and some write it."""

__all__: list[str] = []
