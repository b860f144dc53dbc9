"""Input of the readers and writers of formats: a path to read, content to write, and the names of known files."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Ranks
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import FormatError

__all__ = [
    "INDEX_SUFFIX",
    "LATEST_FILES",
    "MODEL_FILES",
    "MODEL_STEMS",
    "OF_DEEPSPEED",
    "PART_FILE",
    "RANK_FILE",
    "TORCH_FILE",
    "CheckpointContent",
    "SourcePath",
    "all_parts",
    "is_legacy_torch",
    "is_of_fairscale",
    "is_zip",
    "looks_like_safetensors",
    "one_of_many",
    "part_names",
]

INDEX_SUFFIX = ".index.json"
"""The suffix of Hugging Face's index of several files."""

MODEL_STEMS = ("model", "diffusion_pytorch_model")
"""The prefixes of files with weights in a Hugging Face folder: transformers', and diffusers'."""

MODEL_FILES = tuple(f"{stem}.safetensors{suffix}" for stem in MODEL_STEMS for suffix in ("", INDEX_SUFFIX))
"""The file of a Hugging Face folder that holds its weights or their index, in the order of preference."""

TORCH_FILE = "pytorch_model.bin"
"""The same, written by ``torch.save``, as transformers did before safetensors."""

OF_DEEPSPEED = ("_model_states.pt", "-model_states.pt", "_optim_states.pt")
"""The suffixes of DeepSpeed's files."""

LATEST_FILES = ("latest", "latest_universal")
"""Files of DeepSpeed that name the checkpoint's directory beside them."""

RANK_FILE = re.compile(r"rank(\d{1,9})\.pth", re.ASCII)
"""The name of a rank's file in a ``local`` checkpoint."""

PART_FILE = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d{1,9})\.(?P<suffix>safetensors|bin)", re.ASCII)
"""The name of one of the files that Hugging Face's libraries divide a model into."""

_OF_FAIRSCALE = {"param_metadata", "buffer_names"}
_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = re.compile(  # torch's MAGIC_NUMBER, pickled with protocol 2 to 5; from 4 on, there is a frame around it
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)


@dataclass(frozen=True)
class SourcePath:
    """A path to read a checkpoint from, and the caller's wishes."""

    path: Path
    """A file or a directory, which exists."""
    trust: bool = False
    """Keep unknown pickled objects as opaque placeholders instead of rejecting them."""
    reference: Callable[[], Layout | None] = lambda: None
    """Opens a complete checkpoint of the same model, for formats that do not hold all shapes."""
    look_up: bool = True
    """Read the files of all ranks now; otherwise only when a chunk in them is asked for."""
    chosen: bool = False
    """Whether the caller named the format."""

    @cached_property
    def names(self) -> list[str]:
        """The file names in a directory, sorted; empty for a file."""
        if not self.path.is_dir():
            return []
        return (
            sorted(entry.name for entry in self.path.iterdir())
            if is_remote(self.path)
            else sorted(os.listdir(self.path))
        )

    @cached_property
    def head(self) -> bytes:
        """The first 32 bytes of a file; empty for a directory."""
        if self.path.is_dir():
            return b""
        with self.path.open("rb") as file:
            return file.read(32)


@dataclass(frozen=True)
class CheckpointContent:
    """The content of a checkpoint to be written."""

    tree: dict[Any, Any]
    """Nested content with a ``TensorRef`` for each tensor."""
    tensors: Mapping[str, TensorEntry]
    """The tensors by the names of the ``TensorRef``s."""
    named: Mapping[str, TensorEntry]
    """The tensors by their names in a format that holds nothing else."""
    max_shard_size: int | None = None
    """Bytes of tensor data per file, for formats with several files."""
    ranks: Ranks = field(default_factory=lambda: Ranks(1, 1))
    """How many ranks, for formats with files per rank."""
    save_id: str = field(default_factory=lambda: os.urandom(8).hex())
    """Identifies this checkpoint; every file of it carries the same id."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """For ``gguf``: the key-value pairs, each value with its type as the file holds it."""
    stem: str = "model"
    """The prefix of the safetensors files in a folder."""


def looks_like_safetensors(head: bytes) -> bool:
    """Tell from its first nine bytes whether a file may be a safetensors file."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= struct.unpack("<Q", head[:8])[0] <= 100_000_000


def part_names(match: re.Match[str], most: int) -> list[str]:
    """Return the names of all files of a model, given the name of one as `PART_FILE` matches it.

    Args:
        match: The match.
        most: The largest number of names to return.
    """
    stem, width, suffix = match["stem"], len(match["number"]), match["suffix"]
    numbers = range(1, min(int(match["count"]), most) + 1)
    return [f"{stem}-{number:0{width}}-of-{match['count']}.{suffix}" for number in numbers]


def all_parts(names: Sequence[str], suffix: str) -> list[str]:
    """Return the files of a model among the names in a directory, if they are all of one model and none is missing.

    Args:
        names: The names; those with another suffix do not count.
        suffix: ``'.safetensors'`` or ``'.bin'``.
    """
    found = sorted(name for name in names if name.endswith(suffix))
    match = PART_FILE.fullmatch(found[0]) if found else None
    if match is None or match["stem"].startswith("shard-") or int(match["count"]) != len(found):
        return []
    return found if found == part_names(match, len(found)) else []


def is_zip(head: bytes) -> bool:
    """Tell from its first bytes whether a file is a zip archive, as `torch.save` writes since version 1.6."""
    return head.startswith(_ZIP_MAGIC)


def is_legacy_torch(head: bytes) -> bool:
    """Tell from its first bytes whether a file is of `torch.save` before version 1.6."""
    return _LEGACY_MAGIC.match(head) is not None


def is_of_fairscale(value: Any) -> bool:
    """Tell whether a part of a file's content is what fairscale's ``local_metadata_dict()`` returns."""
    return isinstance(value, dict) and {*value} >= _OF_FAIRSCALE


def one_of_many(path: Path) -> FormatError:
    """Return the error for a file that is one rank's part."""
    return FormatError(
        f"{path.name} is one rank's part of a sharded checkpoint; open its directory {str(path.parent)!r} instead.",
        file=str(path),
    )
