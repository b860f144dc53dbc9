"""Reads what FSDP1 stores: flat parameters and their parts, in a file per rank or in DCP directories."""

__all__: list[str] = []
