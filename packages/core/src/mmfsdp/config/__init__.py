"""The configuration models: frozen, validated, torch-free."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
