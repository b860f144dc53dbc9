"""Downloads checkpoints with MMEngine's loaders, at most once per machine, and raises on all ranks if one fails."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import mmengine.runner.checkpoint as stock
import torch

from mmfsdp.basics import hide_secrets, mask_secrets, mask_url
from mmfsdp.collective import scope_of
from mmfsdp.errors import CheckpointError, CorruptCheckpointError, MmfsdpError
from mmfsdp_mmengine.processes.turns import in_turns

__all__ = ["download_content", "local_path"]

_FILE = "file://"


def local_path(filename: str) -> Path:
    """Return the path for the name or ``file://`` URL of a local checkpoint."""
    if filename.startswith(_FILE):
        return Path(unquote(urlparse(filename).path))
    return Path(filename).expanduser()


def download_content(filename: str, map_location: Any, read: Callable[[Path], Any]) -> Any:
    """Return the content of a checkpoint that MMEngine can download. Collective: every rank.

    Files from web servers are stored where MMEngine stores them, in ``TORCH_HOME``. The first rank downloads, and then
    the first rank of every machine that does not see the file: once on a shared file system, otherwise once per
    machine. Ranks wait for each other up to `mmfsdp.collective.wait_timeout`.

    Args:
        filename: A URL or a model zoo's name.
        map_location: The device of tensors that do not come from web servers.
        read: Reads a downloaded file.

    Raises:
        CheckpointError: The checkpoint cannot be downloaded or read; raised on every rank.
    """

    def load() -> Any:
        try:
            with _one_process(read):
                return stock.CheckpointLoader.load_checkpoint(filename, map_location)
        except MmfsdpError:
            raise
        except (OSError, http.client.HTTPException) as error:
            reason = mask_secrets(str(error))
            raise CheckpointError(f"{mask_url(filename)} cannot be downloaded: {reason}") from hide_secrets(error)

    return in_turns(load, scope_of(None))


@contextmanager
def _one_process(read: Callable[[Path], Any]) -> Iterator[None]:
    """Make MMEngine's loaders behave as in a single process, and read files with ``read``.

    Otherwise ranks wait for the first one even after its download failed, and each rank holds the whole content.
    MMEngine has no argument for either.
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
            if is_new:  # the connection broke: download again at the next attempt
                path.unlink(missing_ok=True)
            raise

    before = stock.get_dist_info, stock.load_url
    stock.get_dist_info, stock.load_url = lambda *_: (0, 1), load_url
    try:
        yield
    finally:
        stock.get_dist_info, stock.load_url = before
