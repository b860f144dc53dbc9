"""Imports what many processes of tests need, in the one that they are forked from. None of it starts threads."""

from __future__ import annotations

import contextlib
import importlib

from mmfsdp.testing import _preloaded

# Not mmfsdp_mmengine, which registers: some ranks are to see stock MMEngine.
NAMES = [
    "click",
    "functorch.compile",
    "hypothesis",
    "matplotlib.pyplot",
    "mmengine.runner",
    "mmfsdp.checkpoint.conversion.converting",
    "mmfsdp.checkpoint.formats.torch_files.torch_zip_writer",
    "mmfsdp.checkpoint.inspection.verification",
    "mmfsdp.rehearsal.measured.measuring",
    "pytest",
    "sklearn.datasets",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
]

for name in (*_preloaded, *NAMES):
    with contextlib.suppress(Exception):  # what is missing or does not work fails where a test needs it
        importlib.import_module(name)
