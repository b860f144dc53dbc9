"""Recognises checkpoints of other frameworks, which mmfsdp does not read, and says what does."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["what_to_use"]

_TO_SAFETENSORS = "and safetensors.numpy.save_file writes a file that mmfsdp reads"
# What a file begins with.
_HEADS = {
    b"GGUF": "is a GGUF file of llama.cpp. gguf.GGUFReader of the package gguf reads it",
    b"\x93NUMPY": f"is an array of numpy. numpy.load reads it, {_TO_SAFETENSORS}",
    b"\x89HDF\r\n\x1a\n": f"is an HDF5 file, as Keras writes. h5py.File reads it, {_TO_SAFETENSORS}",
    b"\x1f\x8b": "is compressed with gzip. Decompress it first",
    b"\x28\xb5\x2f\xfd": "is compressed with Zstandard. Decompress it first",
}
# What a name in a directory or in a zip archive, or the name of a file, ends with.
_NAMES = {
    ".npy": f"is an .npz file of numpy. numpy.load reads it, {_TO_SAFETENSORS}",
    ".weights.h5": "is a model of Keras 3. keras.saving.load_model reads it",
    "saved_model.pb": "is a SavedModel of TensorFlow. tf.saved_model.load reads it",
    ".data-00000-of-00001": f"is a checkpoint of TensorFlow. tf.train.load_checkpoint reads it, {_TO_SAFETENSORS}",
    "_CHECKPOINT_METADATA": f"is a checkpoint of Orbax (JAX). orbax.checkpoint reads it, {_TO_SAFETENSORS}",
    ".msgpack": f"is a checkpoint of Flax. flax.serialization.msgpack_restore reads it, {_TO_SAFETENSORS}",
    ".onnx": "is an ONNX model. onnx.load reads it",
}


def what_to_use(head: bytes, names: Sequence[str]) -> str | None:
    """Return what a checkpoint of another framework is and what reads it, to follow its name; ``None`` if unknown.

    Args:
        head: What a file begins with, 16 bytes; empty for a directory.
        names: The names in a directory or in an archive; for another file, its own.
    """
    for magic, text in _HEADS.items():
        if head.startswith(magic):
            return f"{text}."
    for ending, text in _NAMES.items():
        if any(name.endswith(ending) for name in names):
            return f"{text}."
    return None
