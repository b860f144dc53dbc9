"""Converting a checkpoint of any format into another format, or a part of it."""

__all__: list[str] = []
