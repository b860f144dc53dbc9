"""Converts a checkpoint: reads its layout, plans what to write, proves that no tensor lacks data, and copies bytes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import RemoteLike, prefetch, size_of
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.conversion.output import check_output, published_path
from mmfsdp.checkpoint.conversion.selection import Intent, intended
from mmfsdp.checkpoint.conversion.settings import Conversion, target_format
from mmfsdp.checkpoint.files.atomic import (
    commit,
    discard,
    journal_of,
    leave,
    refuse_existing,
    refuse_other_content,
    temporary_sibling,
)
from mmfsdp.checkpoint.files.disk import located, place, present, refuse_missing_parent, remove, write_errors
from mmfsdp.checkpoint.files.scales import scales_of
from mmfsdp.checkpoint.files.writing import Progress, write_files
from mmfsdp.checkpoint.formats.registry import MODEL_FILES, Format, opened
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.integrity import crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.layout import ComputedEntry, Layout, Record, TensorEntry, files_beside
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest, damaged_file, write_manifest
from mmfsdp.checkpoint.tree import find_weights, is_ref, part_tensors
from mmfsdp.errors import CheckpointError, ConfigError, CorruptCheckpointError

__all__ = ["ConversionReport", "convert"]

# Formats of folders in which a model's file and an index may both be.
_IN_FILES = ("huggingface", "safetensors_index", "torch_index")
# One of the files that Hugging Face's libraries divide a model into.
_NUMBERED = re.compile(r".+-\d{5}-of-(\d{5})\.(?:safetensors|bin|pt|pth)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a conversion, or the expected result of a dry run."""

    path: str
    """The target."""
    format: str
    """Its format, such as ``'safetensors'`` or ``'torch_zip'``."""
    conversion: Conversion
    """The settings, with those filled in that were left to the source and the target."""
    tensors: int
    """Number of names written; tied tensors count once per name."""
    bytes: int
    """Bytes of tensor data written; tied tensors count once in a ``.pth`` file."""
    bytes_read: int
    """Bytes of tensor data that are read from the source, apart from the comparison of checksums."""
    files: Mapping[str, int]
    """Files with tensor data by name, and bytes of it; an empty name is the target itself."""
    free_bytes: int
    """Bytes free on the target's disk before the conversion; 0 for a store."""
    dropped: tuple[str, ...]
    """Paths of the parts of the source that are not in the target."""
    renamed: Mapping[str, str]
    """Tensors whose name changed: their name in the part that is kept, and the new one."""
    casts: Mapping[str, str]
    """Tensors whose dtype changed, and their new dtype."""
    overflowed: Mapping[str, int]
    """Tensors in which elements were too large for the dtype that they were cast to, and how many. They became
    infinite, or 448, its largest number, in float8_e4m3fn. Parts kept from an interrupted conversion do not count."""
    notes: tuple[str, ...]
    """Other facts that the user should know."""
    verified: bool
    """Whether the output was read again and compared with the source."""
    dry_run: bool
    """Whether nothing was written."""
    seconds: float
    """Wall time, the reading of metadata included."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**content, "conversion": self.conversion.to_dict()}


def convert(
    source: str | os.PathLike[str] | Layout,
    target: str | os.PathLike[str],
    conversion: Conversion | None = None,
    *,
    reference: str | os.PathLike[str] | Layout | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ConversionReport:
    """Write a checkpoint in another format, in constant memory and without torch.

    Every format that can be read becomes every format that can be written: pieces are put together, divided among
    another number of ranks, or both at once.

    The target appears complete or not at all. Before a byte is copied, `convert` proves that the stored chunks cover
    every tensor.

    Args:
        source: A checkpoint of any kind that ``open_layout`` reads, or what it returned.
        target: The path to write; its suffix ``.safetensors``, ``.pth`` or ``.pt`` sets the format. It may be the URL
            of a file or folder in S3, which is sent in parts as it is produced.
        conversion: What to write and how.
        reference: A complete checkpoint of the same model, if ``source`` does not hold all shapes; see ``open_layout``.
        dry_run: Check and report everything that can be known without writing.
        progress: Called with the bytes copied so far and the bytes to copy. Whatever it raises cancels the conversion.
        **settings: Fields of `Conversion`, such as ``keep="model"``; each replaces that field of ``conversion``.

    Raises:
        ConfigError: A setting is unknown or malformed, a pattern or rename rule matches nothing, two tensors would get
            the same name, the recipe does not fit the weights, or the format cannot hold a dtype.
        CheckpointNotFoundError: There is no checkpoint at ``source``, or no directory for ``target``.
        TargetExistsError: ``target`` exists, or another process is writing it, and ``overwrite`` is false.
        FormatError, UnsafePickleError: ``source`` cannot be read; see ``open_layout``.
        IncompleteCheckpointError, CorruptCheckpointError: ``source`` lacks data, or its data is damaged.
        CheckpointError: The disk of the target is too small, or the target is a directory that holds other things.

    Example:
        >>> convert("work_dirs/run/epoch_12", "model.safetensors", keep="model", dtype="bf16")
        >>> convert("epoch_12", "resumable", Conversion.from_file("export.yaml"), ranks=4)
    """
    began = time.perf_counter()
    chosen = (conversion or Conversion()).changed(settings)
    target = place(target, to_write=True)
    kind = target_format(target, chosen)
    layout = opened(source, trust=chosen.trust, reference=reference, format=chosen.source_format)
    layout, restored = _numbers(layout, kind, chosen)
    is_remote = isinstance(target, RemoteLike)
    with write_errors(target):
        (_refuse_own_urls if is_remote else _refuse_own_files)(layout, target)
    chosen = _completed(chosen, kind, layout)
    like, beside = Path(), dict[str, Path]()
    if kind.name in ("huggingface", "gguf"):
        what = "A GGUF file" if kind.name == "gguf" else "A Hugging Face folder"
        like = _folders().like_folder(chosen.like, layout.path, target, what)
        chosen = chosen.changed({"like": str(like)})
    if kind.name == "huggingface":
        beside = _folders().companions(like, target if chosen.overwrite else None)
    overflowed: Counter[str] = Counter()
    intent = intended(layout, kind, chosen, overflowed, like)
    check_coverage(intent.layout, intent.sources)
    if chosen.verify:
        for origin in layout.origins or (layout,):
            _check_save(origin)
    final, written, free = target, sum(intent.files.values()), 0
    if is_remote:
        _upload(target, intent, kind, chosen, beside, None if dry_run else progress, dry_run=dry_run)
    else:
        free = shutil.disk_usage(located(target).parent).free
    replaces = chosen.overwrite or chosen.publish or is_remote
    if not replaces:
        refuse_existing(target)
    if not dry_run and not is_remote:
        if not chosen.resume:  # a part of it may be there already
            _check_space(target, written, free)
        with write_errors(target):
            refuse_other_content(target, beside)
            temporary = temporary_sibling(target, exclusive=not replaces, resume=chosen.resume)
            try:
                _write(temporary, target, intent, kind, chosen, progress)
                for name, file in beside.items():
                    _folders().copy_companion(file, temporary / name)
                if beside and chosen.quantize:
                    config = _folders().quantized_config(temporary, intent.written, chosen.quantize)
                    (temporary / _folders().CONFIG).write_bytes(config)
                final = published_path(target, temporary) if chosen.publish else target
                commit(temporary, final, overwrite=chosen.overwrite, fsync=chosen.fsync)
            except BaseException:  # an interrupt must not leave a half-written file either
                if chosen.resume:
                    leave(temporary)
                else:
                    discard(temporary)
                raise
            if chosen.resume:
                remove(journal_of(temporary))
    return ConversionReport(
        path=str(final),
        format=intent.format,
        conversion=chosen,
        tensors=len(intent.written),
        bytes=written,
        bytes_read=sum(_stored_bytes(intent.layout.tensors[name]) for name in intent.sources),
        files=intent.files,
        free_bytes=free,
        dropped=intent.dropped,
        renamed=intent.renamed,
        casts=intent.casts,
        overflowed=dict(overflowed),
        notes=(*_not_read(layout), *restored, *intent.notes),
        verified=chosen.verify_output and not dry_run,
        dry_run=dry_run,
        seconds=time.perf_counter() - began,
    )


def _numbers(layout: Layout, kind: Format, chosen: Conversion) -> tuple[Layout, tuple[str, ...]]:
    """Return the source with its 8-bit codes restored if what is written is made of numbers, and a note of that."""
    codes: Mapping[str, str] = {}
    if chosen.quantize != "none":
        found = find_weights(layout.tree, is_ref) if chosen.quantize or kind.name == "gguf" else None
        codes = scales_of(part_tensors(layout, "model")) if found else {}
        if not codes:
            return layout, ()
    notes = (f"{len(codes)} weights were codes of 8 bits, and are restored",) if codes else ()
    return import_module("mmfsdp.checkpoint.files.dequantizing").dequantized(layout), notes


def _not_read(layout: Layout) -> tuple[str, ...]:
    """Return a note of what may belong to the source and is not read: files beside it, or of other ranks or parts."""
    for origin in layout.origins or (layout,):
        if origin.format == "safetensors_ranks":
            files = f"files of {origin.world_size} ranks" if origin.world_size > 1 else "the file of one rank"
            return (f"read: {files} of {origin.path.name}; how many there were is not written anywhere",)
        if other := _weights_beside(origin):
            return (f"not read: {other} of {origin.path.name}, which may hold other weights than those that were read",)
    if others := [name for origin in layout.origins or (layout,) for name in files_beside(origin)]:
        remedy = "common.pt is read with trust" if "common.pt" in others else "convert such a file by itself"
        return (f"not read, as no part of the DCP directory: {name_list(others, 3)}; {remedy}",)
    match = _NUMBERED.fullmatch(layout.path.name)
    if match is None or int(match[1]) < 2 or layout.path.is_dir():
        return ()
    return (f"{layout.path.name} is one of {int(match[1])} files: give the directory or the index for all tensors",)


def _weights_beside(layout: Layout) -> str | None:
    """Return the one of a model's file and its index that is not read, if a folder has both: one is left over."""
    if isinstance(layout.path, RemoteLike) or layout.format not in _IN_FILES or not layout.path.is_dir():
        return None
    read = {file.name for file in layout.files()}
    for file, index in zip(MODEL_FILES[::2], MODEL_FILES[1::2], strict=True):
        if all(present(layout.path / name) for name in (file, index)):
            return index if file in read else file
    return None


def _folders() -> Any:
    return import_module("mmfsdp.checkpoint.formats.huggingface.model_folders")  # for who writes such a folder


def _stored_bytes(entry: TensorEntry) -> int:
    return sum(map(_stored_bytes, entry.parts)) if isinstance(entry, ComputedEntry) else entry.nbytes


def _completed(chosen: Conversion, kind: Format, layout: Layout) -> Conversion:
    """Return the conversion with the settings filled in that were left to the target and the source."""
    weights_alone = chosen.use_ema or chosen.recipe is not None
    by_default = "all" if chosen.drop or (kind.by_rank and not weights_alone) else "model"
    found: dict[str, Any] = {"to": kind.name, "keep": chosen.keep or by_default}
    if kind.by_rank and chosen.ranks is None:
        found["ranks"] = layout.world_size
    return chosen.changed(found)


def _write(
    temporary: Path, target: Path, intent: Intent, kind: Format, chosen: Conversion, progress: Progress | None
) -> None:
    journal = _journal(journal_of(temporary), target, intent) if chosen.resume else None
    try:
        entries = write_files(
            temporary,
            intent.planned,
            verify=chosen.verify,
            progress=progress,
            jobs=chosen.jobs,
            fsync=chosen.fsync,
            journal=journal,
        )
    finally:
        if journal is not None:
            journal.close()
    if kind.directory:
        write_manifest(temporary, save_id=intent.save_id, world_size=intent.world_size, files=entries)
    if chosen.verify_output:
        check_output(temporary, intent.written, trust=chosen.trust, progress=progress)


def _upload(
    target: Path,
    intent: Intent,
    kind: Format,
    chosen: Conversion,
    beside: Mapping[str, Path],
    progress: Progress | None,
    *,
    dry_run: bool,
) -> None:
    module = import_module("mmfsdp.checkpoint.conversion.uploading")  # only for targets in stores
    names = {*beside, *(file.name for file in intent.planned)}
    folder = module.check_target(target, names, chosen, directory=kind.directory)
    if not dry_run:
        contents = {name: path.read_bytes() for name, path in beside.items()}
        if beside and chosen.quantize:
            name = _folders().CONFIG
            contents[name] = _folders().quantized_config(beside[name].parent, intent.written, chosen.quantize)
        module.upload(folder, intent, chosen, directory=kind.directory, beside=contents, progress=progress)
        if chosen.verify_output:
            check_output(place(str(target)), intent.written, trust=chosen.trust, progress=progress)


def _journal(path: Path, target: Path, intent: Intent) -> Any:
    module = import_module("mmfsdp.checkpoint.files.journal")  # only for conversions that may go on
    return module.Journal(path, target, intent.planned)


def _refuse_own_files(layout: Layout, target: Path) -> None:
    refuse_missing_parent(target)
    target = located(target)
    if not target.exists():
        return
    files = [path for path in _paths(layout) if not isinstance(path, RemoteLike)]
    # A directory that holds a source file would be replaced together with it; a file in the directory of a source may
    # be its metadata, or hold nothing but numbers.
    home = target.resolve()
    inside = target.is_dir() and any(file.resolve().is_relative_to(home) for file in files)
    within = target.is_file() and any(file.is_dir() and home.is_relative_to(file.resolve()) for file in files)
    if inside or within or any(os.path.samefile(target, file) for file in files):
        raise _part_of_source(target)


def _refuse_own_urls(layout: Layout, target: Path) -> None:
    if not present(target):
        return
    urls = {str(path) for path in _paths(layout) if isinstance(path, RemoteLike)}
    if str(target) in urls or any(str(target).startswith(f"{url}/") for url in urls):
        raise _part_of_source(target)


def _paths(layout: Layout) -> list[Path]:
    return [layout.path, *(origin.path for origin in layout.origins), *layout.files()]


def _part_of_source(target: Path) -> ConfigError:
    return ConfigError(f"The target {str(target)!r} is part of the source. Choose another path.", file=str(target))


def _check_save(layout: Layout) -> None:
    """Compare every file of a directory with its manifest, if there is one, without reading the tensors.

    The CRC-32 of a file follows from the checksums of its records and the bytes between them. So a file of another
    save is detected by reading a few kilobytes; the records' own data is checked when it is copied.
    """
    directory = layout.path
    if not directory.is_dir() or not present(directory / MANIFEST_NAME):
        return
    manifest = check_manifest(directory)
    records: dict[Path, dict[int, Record]] = {}
    for entry in layout.tensors.values():
        for chunk in entry.chunks():
            if chunk.record is not None and chunk.record.crc32 is not None:
                records.setdefault(chunk.file, {})[chunk.record.offset] = chunk.record
    for name, listed in manifest.files.items():
        path = directory / name
        if listed.crc32 is not None and (found := _crc_of_file(path, records.get(path, {}).values())) != listed.crc32:
            raise CorruptCheckpointError(damaged_file(path, found, listed.crc32), file=str(path))


def _check_space(target: Path, needed: int, free: int) -> None:
    """Raise if a target cannot fit on its disk."""
    if needed > free:
        raise CheckpointError(
            f"There is no room for {target.name}: it needs {needed} bytes, and {free} are free.", file=str(target)
        )


def _crc_of_file(path: Path, records: Iterable[Record]) -> int:
    crc = position = 0
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        records = sorted(records, key=lambda record: record.offset)
        prefetch(descriptor, _between(records, size_of(descriptor)))
        for record in records:
            if record.offset < position:
                continue  # overlapping views of one file
            crc, _ = crc32_of_stretch(descriptor, position, record.offset, crc)
            crc = crc32_combine(crc, record.crc32 or 0, record.nbytes)
            position = record.offset + record.nbytes
        return crc32_of_stretch(descriptor, position, size_of(descriptor), crc)[0]


def _between(records: Sequence[Record], size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what lies between records."""
    position = 0
    for record in records:
        yield position, max(0, record.offset - position)
        position = max(position, record.offset + record.nbytes)
    yield position, size - position
