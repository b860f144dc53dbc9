"""Boxes of tensors and the bytes of files that hold them."""
