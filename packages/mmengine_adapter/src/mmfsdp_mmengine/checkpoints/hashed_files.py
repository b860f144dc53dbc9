"""Publishes a checkpoint: writes chosen keys to one file whose name ends in the first digits of its SHA-256."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmfsdp.checkpoint import convert
from mmfsdp.errors import ConfigError
from mmfsdp.saving import write_archive
from mmfsdp_mmengine.checkpoints.live_content import read_content

__all__ = ["publish"]


def publish(path: Path, keys: Sequence[str]) -> Path:
    """Write some keys of a checkpoint to one file beside it. Not collective.

    Args:
        path: A ``.pth`` file or a checkpoint directory.
        keys: Top-level keys, such as ``'meta'`` and ``'state_dict'``. These two are copied in constant memory.

    Returns:
        The file that was written.

    Raises:
        CheckpointError: The checkpoint cannot be read or written.
        ConfigError: The checkpoint has none of these keys.
    """
    target = path.with_suffix(".pth")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".publishing-") as folder:
        if {*keys} == {"meta", "state_dict"}:
            named = Path(convert(path, Path(folder) / target.name, publish=True, trust=True).path)
            return named.rename(path.with_name(named.name))
        source = path
        if path.is_dir():
            source = Path(folder) / "whole.pth"
            convert(path, source, keep="all", trust=True)
        content = {key: value for key, value in read_content(source).items() if key in keys}
        if not content:
            raise ConfigError(f"{path.name} has none of the published_keys {list(keys)}.", config="published_keys")
        written = Path(folder) / "published.pth"
        write_archive(content, written)
        with written.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        final = target.with_name(f"{target.stem}-{digest[:8]}.pth")
        return written.rename(final)
