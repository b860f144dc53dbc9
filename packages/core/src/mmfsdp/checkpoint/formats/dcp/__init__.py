"""Directories of torch's distributed checkpoint (DCP), and what others store in them."""

__all__: list[str] = []
