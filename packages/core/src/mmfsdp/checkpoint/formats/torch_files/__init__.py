"""Files of torch.save: archives, and those before version 1.6."""

__all__: list[str] = []
