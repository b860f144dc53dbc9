"""Checkpoints that MMEngine downloads: once per machine at most, and a failure stops all ranks."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import mmengine.runner.checkpoint as stock
import torch

from mmfsdp.collective import scope_of
from mmfsdp.errors import CheckpointError, CorruptCheckpointError
from mmfsdp_mmengine.processes.machines import in_turns

__all__ = ["download_content", "local_path"]

_FILE = "file://"


def local_path(filename: str) -> Path:
    """Return the path that a name or a ``file://`` URL of a local checkpoint means."""
    if filename.startswith(_FILE):
        return Path(unquote(urlparse(filename).path))
    return Path(filename).expanduser()


def download_content(filename: str, map_location: Any, read: Callable[[Path], Any]) -> Any:
    """Return the content of a checkpoint that MMEngine downloads. Collective: every rank.

    Files of web servers are kept where MMEngine keeps them, in ``TORCH_HOME``. The first rank downloads, then the first
    rank of each machine on which the file is not there by then: once for a file system that all share, else once per
    machine. Ranks wait for each other as long as `mmfsdp.collective.wait_timeout` says.

    Args:
        filename: A URL or a model zoo's name.
        map_location: Where tensors are put that come from elsewhere than web servers.
        read: Reads a downloaded file.

    Raises:
        CheckpointError: It cannot be downloaded or read; raised on every rank.
    """

    def load() -> Any:
        try:
            with _one_process(read):
                return stock.CheckpointLoader.load_checkpoint(filename, map_location)
        except (OSError, http.client.HTTPException) as error:
            raise CheckpointError(f"{filename} cannot be downloaded: {error}") from error

    return in_turns(load, scope_of(None))


@contextmanager
def _one_process(read: Callable[[Path], Any]) -> Iterator[None]:
    """Let MMEngine's loaders do as a single process does, and read with ``read``.

    Else ranks wait for the first one even after its download failed, and each holds the whole content. There is no
    argument for either.
    """

    def load_url(url: str, model_dir: str | None = None, progress: bool = True, **_: Any) -> Any:
        path = Path(model_dir or Path(torch.hub.get_dir()) / "checkpoints") / Path(urlparse(url).path).name
        is_new = not path.exists()
        if is_new:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), progress=progress)
        try:
            return read(path)
        except CorruptCheckpointError:
            if is_new:  # a connection that broke; the next attempt is to download again
                path.unlink(missing_ok=True)
            raise

    before = stock.get_dist_info, stock.load_url
    stock.get_dist_info, stock.load_url = lambda *_: (0, 1), load_url
    try:
        yield
    finally:
        stock.get_dist_info, stock.load_url = before
