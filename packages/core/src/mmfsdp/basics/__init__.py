"""Tools for every subpackage: text, dtypes, references by name, boxes of tensors, and imports on first use."""

from __future__ import annotations

from mmfsdp.basics.lazy import lazy

# The stub beside this file lists the public names.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
