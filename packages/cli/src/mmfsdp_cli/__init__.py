"""The command line of mmfsdp; it prints what the library finds and decides nothing itself."""

__all__ = ["__version__"]

__version__ = "0.1.0"
