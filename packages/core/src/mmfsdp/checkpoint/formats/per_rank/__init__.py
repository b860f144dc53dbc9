"""Directories with a file of torch.save per rank."""

__all__: list[str] = []
