"""Converts a checkpoint: reads its layout, plans what to write, proves that no tensor lacks data, and copies bytes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import is_remote, prefetch, size_of
from mmfsdp.checkpoint.chunks import Record
from mmfsdp.checkpoint.conversion.selection import intended
from mmfsdp.checkpoint.conversion.settings import Conversion, target_format
from mmfsdp.checkpoint.conversion.targets import Companion, ConversionTarget, DiskTarget
from mmfsdp.checkpoint.failed_downloads import pointer_notes
from mmfsdp.checkpoint.files.dequantizing import restore_codes
from mmfsdp.checkpoint.files.disk import checkpoint_path, present
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.formats.registry import format_of
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.integrity import crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest, damaged_file
from mmfsdp.checkpoint.tree import find_weights, is_ref
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["ConversionReport", "convert"]


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
        """Return plain values for JSON; `tensors` is ``num_tensors`` there."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"num_tensors": content.pop("tensors"), **content, "conversion": self.conversion.to_dict()}


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
        source: A checkpoint of any kind that ``open_layout`` reads, or the layout that it returned.
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
    path = checkpoint_path(target, to_write=True)
    kind = target_format(path, chosen)
    layout = opened(source, trust=chosen.trust, reference=reference, format=chosen.source_format)
    if chosen.source_format is None:
        format_of(layout).refuse_part(layout)
    layout, restored = _numbers(layout, kind, chosen)
    to = _target(path, kind, chosen)
    to.refuse_source(layout)
    chosen = _completed(chosen, kind, layout)
    form = kind.model_form(chosen.like, layout.path, path)
    if kind.like:
        chosen = chosen.changed({"like": str(form.like)})
    copied = form.companions(path if chosen.overwrite else None)
    overflowed: Counter[str] = Counter()
    intent = intended(layout, kind, chosen, overflowed, form)
    check_coverage(intent.layout, intent.sources)
    if chosen.verify:
        for origin in layout.origins or (layout,):
            _check_save(origin)
    to = replace(to, chosen=chosen)
    beside: dict[str, Companion] = {**copied, **form.rewritten(intent.written, chosen.quantize)}
    free = to.check(intent, beside)
    final = path if dry_run else to.write(intent, beside, progress)
    origins = layout.origins or (layout,)
    not_read = next(filter(None, (format_of(origin).notes(origin) for origin in origins)), ())
    noted = [*not_read, *pointer_notes(copied), *(note for origin in origins for note in origin.notes)]
    return ConversionReport(
        path=str(final),
        format=intent.format,
        conversion=chosen,
        tensors=len(intent.written),
        bytes=sum(intent.files.values()),
        bytes_read=sum(part.nbytes for name in intent.sources for part in intent.layout.tensors[name].stored_parts()),
        files=intent.files,
        free_bytes=free,
        dropped=intent.dropped,
        renamed=intent.renamed,
        casts=intent.casts,
        overflowed=dict(overflowed),
        notes=(*noted, *restored, *intent.notes),
        verified=chosen.verify_output and not dry_run,
        dry_run=dry_run,
        seconds=time.perf_counter() - began,
    )


def _numbers(layout: Layout, kind: Format, chosen: Conversion) -> tuple[Layout, tuple[str, ...]]:
    """Return the source with its 8-bit codes restored if what is written is made of numbers, and a note of that."""
    required = chosen.quantize == "none"
    if not kind.restores_codes(chosen.quantize) or not (required or find_weights(layout.tree, is_ref)):
        return layout, ()
    [restored] = restore_codes([layout], required=required)
    count = sum(entry is not layout.tensors[name] for name, entry in restored.tensors.items())
    return restored, (f"{count} weights were codes of 8 bits, and are restored",) if count and not required else ()


def _completed(chosen: Conversion, kind: Format, layout: Layout) -> Conversion:
    """Return the conversion with the settings filled in that were left to the target and the source."""
    weights_alone = chosen.use_ema or chosen.recipe is not None
    by_default = "all" if chosen.drop or (kind.by_rank and not weights_alone) else "model"
    found: dict[str, Any] = {"to": kind.name, "keep": chosen.keep or by_default}
    if kind.by_rank and chosen.ranks is None:
        found["ranks"] = layout.world_size
    return chosen.changed(found)


def _target(path: Path, kind: Format, chosen: Conversion) -> ConversionTarget:
    if not is_remote(path):
        return DiskTarget(path, kind, chosen)
    from mmfsdp.checkpoint.conversion.uploading import StoreTarget

    return StoreTarget(path, kind, chosen)


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
