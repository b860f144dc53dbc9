"""Checkpoints on servers: read by ranges over HTTP, or through fsspec, with nothing kept on this machine."""
