"""mmfsdp for MMEngine: importing this package registers its classes in MMEngine's registries."""

__all__ = ["__version__"]

__version__ = "0.1.0"
