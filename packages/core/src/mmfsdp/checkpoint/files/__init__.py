"""From bytes of some files to bytes of others: in constant memory, checked, and complete or not there at all."""

__all__: list[str] = []
