"""Hugging Face folders: their weights and names, and the files beside the weights."""

__all__: list[str] = []
