"""Lists every checkpoint format, and opens a checkpoint of any of them, which it recognises by the content.

A new format is one module in this folder and one entry in ``FORMATS``. The module has ``read(source) -> Layout``, and
``plan_write(content) -> list[PlannedFile]`` if the format can be written; it is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Ranks
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.files.disk import nearest, of_file, place
from mmfsdp.checkpoint.files.siblings import interrupted
from mmfsdp.checkpoint.integrity import refuse_special
from mmfsdp.checkpoint.layout import Layout, PlannedFile, TensorEntry
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    closest,
)

__all__ = [
    "FORMATS",
    "INDEX_SUFFIX",
    "MODEL_FILES",
    "MODEL_STEMS",
    "OF_DEEPSPEED",
    "RANK_FILE",
    "TORCH_FILE",
    "Content",
    "Format",
    "FormatInfo",
    "Source",
    "find_format",
    "format_of_suffix",
    "known_formats",
    "looks_like_safetensors",
    "open_layout",
    "opened",
]

INDEX_SUFFIX = ".index.json"
"""What the name of Hugging Face's index of several files ends with."""

MODEL_STEMS = ("model", "diffusion_pytorch_model")
"""What the names of weights in a Hugging Face folder begin with: those of transformers, of diffusers."""

MODEL_FILES = tuple(f"{stem}.safetensors{suffix}" for stem in MODEL_STEMS for suffix in ("", INDEX_SUFFIX))
"""The file of a Hugging Face folder that holds its weights or their index, in the order of preference."""

TORCH_FILE = "pytorch_model.bin"
"""The same, written by ``torch.save``, as transformers did before safetensors."""

OF_DEEPSPEED = ("_model_states.pt", "-model_states.pt", "_optim_states.pt")
"""What the names of DeepSpeed's files end with."""

RANK_FILE = re.compile(r"rank(\d{1,9})\.pth", re.ASCII)
"""The name of a rank's file in a ``local`` checkpoint."""

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = re.compile(  # torch's MAGIC_NUMBER, pickled with protocol 2 to 5; from 4 on, there is a frame around it
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)
_ITEM_OF_RANK = re.compile(r".+_0\.pt", re.ASCII)
_NAMED_RANK_FILE = re.compile(r".*rank[_-]?\d{1,9}\.(pt|pth|bin)", re.ASCII)
_SHARD_FILE = re.compile(r".*shard[_-]?\d{1,9}\.(pt|pth|bin|torch)|.+[_-]\d{1,9}\.torch", re.ASCII)


@dataclass(frozen=True)
class Source:
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
        return sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []

    @cached_property
    def head(self) -> bytes:
        """The first 32 bytes of a file; empty for a directory."""
        if self.path.is_dir():
            return b""
        with self.path.open("rb") as file:
            return file.read(32)


@dataclass(frozen=True)
class Content:
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
    """What the names of safetensors files in a folder begin with."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of checkpoints: pure data, apart from recognising it by first bytes and file names."""

    name: str
    """Its name, as ``Layout.format`` reports it."""
    description: str
    """What it is, in a few words."""
    module: str | None
    """The module of this folder that reads it; ``None`` if it is only written."""
    sniff: Callable[[Source], bool] | None = None
    """Tells from first bytes and file names whether a path is of this format; ``None`` if the reader of a related
    format, listed before, tells them apart."""
    reader: str = "read"
    """The function of the module that reads it."""
    writer: str | None = None
    """The module that plans files of this format with its ``plan_write``; ``None`` if it cannot be written."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of a target that ask for it."""
    directory: bool = False
    """Whether it is a directory (or its index), which gets a manifest when it is written."""
    tensors_only: bool = False
    """Whether it holds nothing but tensors."""
    by_rank: bool = False
    """Whether it has a file per rank."""
    flat: bool = False
    """Whether bare weights lie at its top, without a key above."""
    optimizer_names: bool = False
    """Whether optimizer state is keyed by parameter names rather than by numbers."""

    def read(self, source: Source) -> Layout:
        """Read the layout of a checkpoint of this format; see the format's module for errors."""
        assert self.module is not None
        layout: Layout = getattr(_module(self.module), self.reader)(source)
        return layout

    def plan_write(self, content: Content) -> list[PlannedFile]:
        """Return the files that will hold the content; see the format's module for errors."""
        assert self.writer is not None
        planned: list[PlannedFile] = _module(self.writer).plan_write(content)
        return planned


def _module(name: str) -> Any:
    return import_module(f"mmfsdp.checkpoint.formats.{name}")


def looks_like_safetensors(head: bytes) -> bool:
    """Tell from its first nine bytes whether a file may be a safetensors file."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= struct.unpack("<Q", head[:8])[0] <= 100_000_000


def _has_rank_files(source: Source) -> bool:
    return any(RANK_FILE.fullmatch(name) for name in source.names)


def _has_index(source: Source) -> bool:
    return source.head.lstrip().startswith(b"{") or any(name.endswith(INDEX_SUFFIX) for name in source.names)


def _is_of_deepspeed(source: Source) -> bool:
    if any(name.endswith(OF_DEEPSPEED) for name in source.names):
        return True
    return any((source.path / name).is_file() for name in source.names if name in ("latest", "latest_universal"))


def _is_model_folder(source: Source) -> bool:
    return "config.json" in source.names and not {*MODEL_FILES}.isdisjoint(source.names)


def _is_torch_folder(source: Source) -> bool:
    return TORCH_FILE in source.names and not any(
        name.endswith((".safetensors", INDEX_SUFFIX)) for name in source.names
    )


# The first whose `sniff` says yes reads a path: a directory may hold several.
FORMATS: tuple[Format, ...] = (
    Format(
        "safetensors",
        "a safetensors file",
        "safetensors",
        lambda source: looks_like_safetensors(source.head),
        writer="safetensors",
        suffixes=(".safetensors",),
        tensors_only=True,
    ),
    Format(
        "torch_zip",
        "a file of torch.save",
        "torch_zip",
        lambda source: source.head.startswith(_ZIP_MAGIC),
        writer="torch_zip_writer",
        aliases=("pth", "pt"),
        suffixes=(".pth", ".pt"),
    ),
    Format(
        "rank_local",
        "a directory with a file of torch.save per rank, and a manifest",
        "rank_local",
        _has_rank_files,
        writer="rank_local",
        aliases=("local",),
        directory=True,
        by_rank=True,
    ),
    Format(
        "megatron",
        "a directory of Megatron-Core's torch_dist: DCP with metadata.json, and optimizer state by other names",
        "megatron",
        lambda source: ".metadata" in source.names and "metadata.json" in source.names,
        directory=True,
    ),
    Format(
        "dcp",
        "a directory of torch's distributed checkpoint (DCP), with a manifest",
        "dcp",
        lambda source: ".metadata" in source.names,
        writer="dcp_writer",
        aliases=("sharded",),
        directory=True,
        by_rank=True,
        flat=True,
        optimizer_names=True,
    ),
    Format(
        "huggingface",
        "a folder that from_pretrained of transformers loads: safetensors, config and tokenizer",
        "huggingface.folder_weights",
        _is_model_folder,
        writer="huggingface.folder_weights",
        aliases=("hf",),
        directory=True,
        tensors_only=True,
    ),
    Format(
        "safetensors_index",
        "a directory of safetensors files with their index and a manifest",
        "shard_indexes",
        _has_index,
        writer="shard_indexes",
        directory=True,
        tensors_only=True,
    ),
    Format(
        "torch_index",
        "a directory of torch.save files of Hugging Face: pytorch_model.bin, or several and their index",
        "shard_indexes",
        _is_torch_folder,
        reader="read_torch",
        directory=True,
    ),
    Format(
        "fairscale",
        "a directory with a file per rank of fairscale's FSDP: its local state dict, and the metadata",
        "fairscale",
        lambda source: any(_SHARD_FILE.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "dtensor_ranks",
        "a directory with a file of torch.save per rank that holds DTensors, as verl, accelerate and scripts do",
        "dtensor_ranks",
        lambda source: any(_NAMED_RANK_FILE.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "torch_checkpointing",
        "a directory of Meta's torch_checkpointing, with a file of torch.save per item and rank",
        "torch_checkpointing",
        lambda source: any(_ITEM_OF_RANK.fullmatch(name) for name in source.names),
        directory=True,
    ),
    Format(
        "safetensors_ranks",
        "a directory of safetensors files per rank, as torch's HuggingFaceStorageWriter leaves them",
        "safetensors",
        lambda source: any(name.endswith(".safetensors") for name in source.names),
        reader="read_ranks",
        directory=True,
    ),
    Format(
        "mmengine_local",
        "a directory with a file of torch.save per rank from FSDP1, as stock MMEngine 0.8 to 0.10 saves it",
        "fsdp1.mmengine_local",
        directory=True,
    ),
    Format(
        "deepspeed",
        "a directory of DeepSpeed: ZeRO stages 0 to 3, a universal checkpoint, or the one with its file latest",
        "deepspeed.saves",
        _is_of_deepspeed,
        directory=True,
    ),
    Format(
        "dcp_flat",
        "a DCP directory of FSDP1's local state dicts: parts of flat parameters",
        "fsdp1.dcp_flat",
        directory=True,
    ),
    Format(
        "torch_legacy",
        "a file of torch.save before version 1.6",
        "torch_legacy",
        lambda source: _LEGACY_MAGIC.match(source.head) is not None,
    ),
    Format(
        "gguf",
        "a GGUF file of a Llama-like model, which llama.cpp loads",
        None,
        writer="gguf.gguf_files",
        suffixes=(".gguf",),
        tensors_only=True,
    ),
)
"""Every format, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format of checkpoints, for people and for JSON."""

    name: str
    """Its name: what ``to`` and ``source_format`` accept."""
    description: str
    """What it is, in a few words."""
    reads: bool
    """Whether ``open_layout`` reads it. Whatever can be read can be converted to whatever can be written, to
    ``gguf`` if the model is like Llama."""
    writes: bool
    """Whether ``convert`` writes it."""
    suffixes: tuple[str, ...]
    """Suffixes of a target that ask for it."""
    aliases: tuple[str, ...]
    """Other names that are accepted for it."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def known_formats() -> list[FormatInfo]:
    """Return the formats, those that can be written first. All of them can be read, but for ``gguf``."""
    infos = [
        FormatInfo(
            item.name, item.description, item.module is not None, item.writer is not None, item.suffixes, item.aliases
        )
        for item in FORMATS
    ]
    return sorted(infos, key=lambda info: not info.writes)


def find_format(name: str, among: Iterable[Format] = FORMATS, what: str = "format") -> Format:
    """Return a format by its name or an alias.

    Args:
        name: The name.
        among: The formats that are possible.
        what: What those are, for the message: ``'format to write'``.

    Raises:
        ConfigError: There is no such format; the message suggests the nearest names.
    """
    names = {spelling: item for item in among for spelling in (item.name, *item.aliases)}
    if name not in names:
        hint = closest(name, names, count=1) or f" Accepted: {', '.join(map(repr, names))}."
        raise ConfigError(f"{name!r} is not a {what}.{hint}")
    return names[name]


def format_of_suffix(suffix: str) -> Format | None:
    """Return the format that a target's suffix, such as ``'.pth'``, asks for; ``None`` if there is none."""
    return next((item for item in FORMATS if suffix.lower() in item.suffixes), None)


def open_layout(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    reference: str | os.PathLike[str] | Layout | None = None,
    format: str | None = None,
    look_up: bool = True,
) -> Layout:
    """Read the layout of a checkpoint: its tensors, where their bytes lie, and everything else that it holds.

    Only metadata is read; torch is not imported, and nothing that a pickle names is imported or run. If a process died
    while it replaced a directory, so that nothing is left at the path, what it left beside the path is opened.

    Args:
        path: A ``.pth``/``.pt`` file of ``torch.save``, a safetensors file, an index of several such files, or a
            directory: of a file per rank (``rank{i}.pth`` of mmfsdp or MMEngine, or DTensors under any name that ends
            with the rank), of torch's distributed checkpoint (DCP), of DeepSpeed, of fairscale, or of safetensors or
            ``torch.save`` files with their index. Or the URL of one of these: ``https://``, or what fsspec reads, such
            as ``s3://``.
        trust: Keep pickled objects that are not on the list of safe names as opaque placeholders instead of rejecting
            the file. They are not imported even then.
        reference: A complete checkpoint of the same model, for ``rank{i}.pth`` files of stock MMEngine and DCP
            directories of FSDP1's ``LOCAL_STATE_DICT`` that do not hold the shapes of all parameters: those saved
            without an optimizer, from plain SGD or with frozen parameters.
        format: Name of the format as `known_formats` lists it, if a directory holds several or the content misleads.
        look_up: Read the files of all ranks now. Otherwise a rank's file is read only when a chunk in it is asked for,
            provided that the first file describes the others.

    Raises:
        ConfigError: ``format`` is unknown, or names a file format for a directory or the reverse.
        CheckpointNotFoundError: There is nothing at ``path``, or a directory without a checkpoint.
        FormatError: The format is unknown or not supported.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
        IncompleteCheckpointError: Parts of the checkpoint are missing.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    path = place(path)
    path = interrupted(path) or path
    source = Source(path, trust, partial(_reference, reference, trust), look_up, chosen=format is not None)
    try:
        refuse_special(path)
        if not path.exists():
            raise CheckpointNotFoundError(f"There is no checkpoint at {str(path)!r}.{nearest(path)}", file=str(path))
        with _garbage_collection_off():
            layout = (_recognised(source) if format is None else _chosen(format, path)).read(source)
        "".join(layout.tensors).encode()  # half of a surrogate pair cannot be written
        return layout
    except CheckpointError as error:
        raise of_file(error, path) from error.__cause__
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(
            f"{path.name} lists {os.path.basename(error.filename or '')!r}, which is not there: either it is a link "
            "to a file that does not exist, or another process removed it while the checkpoint was read. Restore the "
            "file, or try again when no other process writes there.",
            file=str(path),
        ) from error
    except RecursionError as error:
        raise CorruptCheckpointError(f"{path.name} is nested too deeply.", file=str(path)) from error
    except (IsADirectoryError, NotADirectoryError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}.", file=str(path)) from error


def opened(given: str | os.PathLike[str] | Layout, **options: Any) -> Layout:
    """Return a layout that is given as it is, or what `open_layout` returns for a path; ``options`` are its own."""
    return given if isinstance(given, Layout) else open_layout(given, **options)


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    # The collector looks at all objects each time their number has grown by some. A large checkpoint is read into a
    # hundred thousand objects and more, none of them garbage: docs/adr/0006-mechanisms-removed-and-kept.md.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recognised(source: Source) -> Format:
    if (source.path.suffix == ".distcp" or source.path.name == ".metadata") and not source.names:
        raise FormatError(
            f"{source.path.name} is one file of torch's distributed checkpoint; open its directory "
            f"{str(source.path.parent)!r} instead.",
            file=str(source.path),
        )
    for item in FORMATS:
        if item.sniff is not None and item.sniff(source):
            return item
    path = source.path
    if text := _module("foreign").what_to_use(source.head, source.names or [path.name]):
        raise FormatError(f"{path.name} {text}", file=str(path))
    if path.is_dir():
        reason = (
            "it has no file of a rank such as rank0.pth, no .metadata of torch's DCP, no index and no safetensors file"
        )
        if any(name.endswith(".distcp") for name in source.names):
            reason = "it has no .metadata, which torch's DCP writes last, so its save did not finish"
        raise CheckpointNotFoundError(
            f"The directory {str(path)!r} is not a checkpoint: {reason}. It holds "
            f"{name_list(source.names) or 'nothing'}.{_module('suggestions').nearby(source)}",
            file=str(path),
        )
    if not source.head:
        raise CorruptCheckpointError(f"{path.name} is empty.", file=str(path))
    raise FormatError(
        f"{path.name} is not a checkpoint of a known format: it begins with {source.head[:8]!r}. Known are the files "
        "of torch.save (.pth, .pt, .bin), safetensors files, their indexes, and directories of rank{i}.pth files or of "
        "torch's distributed checkpoint.",
        file=str(path),
    )


def _chosen(name: str, path: Path) -> Format:
    directory = path.is_dir() or path.name.endswith(INDEX_SUFFIX)
    kind = "directory" if directory else "file"
    return find_format(
        name,
        [item for item in FORMATS if item.module and item.directory == directory],
        f"format of the {kind} {path.name!r}",
    )


def _reference(given: str | os.PathLike[str] | Layout | None, trust: bool) -> Layout | None:
    return None if given is None else opened(given, trust=trust)
