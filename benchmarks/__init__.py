"""Measures mmfsdp against other tools and against the hardware."""

import os

# Programs that a benchmark starts keep their bytecode, as installed ones do: compiling takes as long as reading 1 GB.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
