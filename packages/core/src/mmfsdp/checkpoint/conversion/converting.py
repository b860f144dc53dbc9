"""Turns a checkpoint of any format into another: read its layout, decide what to write, prove it whole, copy bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmfsdp.basics.text import parse_bytes
from mmfsdp.checkpoint.conversion.intent import Intent, intended
from mmfsdp.checkpoint.conversion.one_save import check_save
from mmfsdp.checkpoint.conversion.output import check_output, check_replaceable, check_space, free_bytes
from mmfsdp.checkpoint.conversion.ranks import Ranks
from mmfsdp.checkpoint.conversion.renaming import NameRules
from mmfsdp.checkpoint.conversion.selection import Part
from mmfsdp.checkpoint.files.atomic import (
    commit,
    discard,
    located,
    refuse_existing,
    refuse_missing_parent,
    temporary_sibling,
)
from mmfsdp.checkpoint.files.tracking import Progress
from mmfsdp.checkpoint.files.write_errors import writing
from mmfsdp.checkpoint.files.writing import write_files
from mmfsdp.checkpoint.formats.detect import open_layout
from mmfsdp.checkpoint.formats.targets import published_path, target_format
from mmfsdp.checkpoint.geometry.coverage import check_coverage
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.errors import ConfigError

__all__ = ["ConversionReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion wrote, or would write."""

    path: str
    """The target."""
    format: str
    """Its format, such as ``'safetensors'`` or ``'torch_zip'``."""
    tensors: int
    """Number of names written; tied tensors count once per name."""
    bytes: int
    """Bytes of tensor data written; tied tensors count once in a ``.pth`` file."""
    bytes_read: int
    """Bytes of tensor data that are read from the source, apart from the comparison of checksums."""
    files: Mapping[str, int]
    """Files with tensor data by name, and bytes of it; an empty name is the target itself."""
    free_bytes: int
    """Bytes free on the target's disk before the conversion."""
    dropped: tuple[str, ...]
    """Paths of the parts of the source that are not in the target."""
    casts: Mapping[str, str]
    """Tensors whose dtype changed, and their new dtype."""
    overflowed: Mapping[str, int]
    """Tensors in which elements were too large for the dtype that they were cast to, and how many. They became
    infinite, or 448, its largest number, in float8_e4m3fn."""
    notes: tuple[str, ...]
    """What else one should know."""
    verified: bool
    """Whether the output was read again and compared with the source."""
    dry_run: bool
    """Whether nothing was written."""
    seconds: float
    """Wall time, the reading of metadata included."""

    def describe(self) -> dict[str, Any]:
        """Return what ``convert --json`` prints: plain values only."""
        return asdict(self)


@dataclass
class _Overflows:
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count


def convert(
    source: str | os.PathLike[str] | Layout,
    target: str | os.PathLike[str],
    *,
    keep: str | None = None,
    drop: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    strip_prefix: str | None = None,
    dtype: str | Mapping[str, str] | None = None,
    use_ema: bool = False,
    publish: bool = False,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    trust: bool = False,
    verify: bool = True,
    verify_output: bool = False,
    fsync: bool = True,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    source_format: str | None = None,
    to: str | None = None,
    ranks: int | str | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
) -> ConversionReport:
    """Write a checkpoint in another format, in constant memory and without torch.

    Every format that can be read becomes every format that can be written: pieces are put together, divided anew among
    any number of ranks, or both at once.

    The target appears complete or not at all. Before a byte is copied, every tensor is proven to be covered by what is
    stored.

    Args:
        source: A checkpoint of any kind that ``open_layout`` reads, or what it returned.
        target: What to write; its suffix ``.safetensors``, ``.pth`` or ``.pt`` says the format.
        keep: ``'model'``: the weights (in a ``.pth`` file as ``{'state_dict': ..., 'meta': ...}``, the shape that
            OpenMMLab publishes; in a distributed checkpoint their bare names). ``'all'``: everything; in a ``.pth``
            file what a ``full`` checkpoint holds, in a safetensors file every tensor under its whole path such as
            ``'optimizer/state/0/exp_avg'``. Otherwise a top-level key such as ``'ema_state_dict'``. By default
            everything for directories that training resumes from (``dcp``, ``local``), else the weights.
        drop: Keep everything but these top-level keys, such as ``['optimizer']``.
        include: Take only tensors whose name in the part that is kept matches a glob (``*`` within one dotted part,
            ``**`` across parts) or ``'re:...'``.
        exclude: Leave out what matches one of these.
        rename: Regular expressions and replacements as for ``re.sub``, applied in order to the names.
        strip_prefix: Take this off the beginning of names that have it, before they are renamed.
        dtype: Cast floating point tensors to this dtype, or those that match a pattern to its dtype; the patterns see
            the new names. One of float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64. Rounds to nearest,
            ties to even; what is too large becomes infinite (448 in float8_e4m3fn) and is reported. Needs numpy.
        use_ema: Take the averaged weights as the model's.
        publish: Write the weights and ``meta`` only, and put the first eight digits of the file's SHA-256 in its name.
        max_shard_size: Write a directory of safetensors files with at most so many bytes of tensor data each, such as
            ``'5GB'``, and their index.
        overwrite: Replace an existing target.
        trust: Keep unknown pickled objects as opaque placeholders, never imported, instead of refusing the source. They
            are written again into a ``.pth`` target.
        verify: Compare stored CRC-32 checksums with the data, and a directory with its manifest. Records that are
            copied whole are compared on the way, others are read twice.
        verify_output: Read the output before it appears, and compare every tensor with the source.
        fsync: Wait until the output is on disk.
        jobs: Threads that copy; by default one per processor, four at most. The output does not depend on it.
        dry_run: Check and report everything that can be known without writing.
        progress: Called with the bytes copied so far and the bytes to copy. What it raises cancels the conversion.
        source_format: What ``source`` is, if it is not to be told from its content; see ``open_layout``.
        to: ``'safetensors'``, ``'pth'``, ``'safetensors_index'``, ``'dcp'`` or ``'local'``, where the suffix does not
            say.
        ranks: Among how many ranks ``dcp`` and ``local`` divide the tensors: a number, or such as ``'2x4'`` for two
            replicas of four shards. By default as many as wrote the source.
        reference: A whole checkpoint of the same model, where ``source`` does not say all shapes; see ``open_layout``.

    Raises:
        ConfigError: An argument is unknown or malformed, a pattern or rewrite matches nothing, two tensors would get
            one name, or the format cannot hold a dtype.
        CheckpointNotFoundError: There is no checkpoint at ``source``, or no directory for ``target``.
        TargetExistsError: ``target`` exists, or another process is writing it, and ``overwrite`` is false.
        FormatError, UnsafePickleError: ``source`` cannot be read; see ``open_layout``.
        IncompleteCheckpointError, CorruptCheckpointError: ``source`` lacks data, or its data is damaged.
        CheckpointError: The disk of the target is too small, or the target is a directory that holds other things.
    """
    began = time.perf_counter()
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs} (--jobs) does not make sense; use 1 or more.")
    target = Path(target)
    if publish and (keep not in (None, "model") or drop):
        raise ConfigError(f"publish=True (--publish) writes the weights; it cannot go with keep={keep!r}.")
    limit = None if max_shard_size is None else parse_bytes(max_shard_size)
    kind = target_format(target, to, limit)
    if publish and kind.directory:
        raise ConfigError(f"publish=True (--publish) writes one file; it cannot go with to={kind.spellings[0]!r}.")
    if ranks is not None and not kind.by_rank:
        raise ConfigError(f"ranks={ranks!r} (--ranks) is for to='dcp' and to='local', not {kind.spellings[0]!r}.")
    rules = NameRules(tuple(include), tuple(exclude), tuple(rename), strip_prefix)
    layout = (
        source
        if isinstance(source, Layout)
        else open_layout(source, trust=trust, reference=reference, format=source_format)
    )
    with writing(target):
        _refuse_own_files(layout, target)
    overflows = _Overflows()
    intent = intended(
        layout,
        kind,
        Part.chosen(keep, drop, by_default="all" if kind.by_rank and not use_ema else "model"),
        rules,
        use_ema=use_ema,
        dtype=dtype,
        limit=limit,
        ranks=Ranks.parse(layout.world_size if ranks is None else ranks),
        overflow=overflows.note,
    )
    check_coverage(layout, intent.sources)
    if verify:
        check_save(layout)
    free = free_bytes(target)
    final, written = target, sum(intent.files.values())
    if not overwrite and not publish:
        refuse_existing(target)
    if not dry_run:
        check_space(target, written, free)
        with writing(target):
            check_replaceable(target)
            temporary = temporary_sibling(target, exclusive=not overwrite and not publish)
            try:
                entries = write_files(
                    temporary, intent.planned, verify=verify, progress=progress, jobs=jobs, fsync=fsync
                )
                if kind.directory:
                    write_manifest(temporary, save_id=intent.save_id, world_size=intent.world_size, files=entries)
                if verify_output:
                    check_output(temporary, intent.written, trust=trust, progress=progress)
                final = published_path(target, temporary) if publish else target
                commit(temporary, final, overwrite=overwrite, fsync=fsync)
            except BaseException:  # an interrupt must not leave a half-written file either
                discard(temporary)
                raise
    return _report(intent, layout, final, written, free, overflows, verify_output, dry_run, began)


def _report(
    intent: Intent,
    layout: Layout,
    final: Path,
    written: int,
    free: int,
    overflows: _Overflows,
    verified: bool,
    dry_run: bool,
    began: float,
) -> ConversionReport:
    return ConversionReport(
        path=str(final),
        format=intent.format,
        tensors=len(intent.written),
        bytes=written,
        bytes_read=sum(layout.tensors[name].nbytes for name in intent.sources),
        files=intent.files,
        free_bytes=free,
        dropped=intent.dropped,
        casts=intent.casts,
        overflowed=overflows.counts,
        notes=intent.notes,
        verified=verified and not dry_run,
        dry_run=dry_run,
        seconds=time.perf_counter() - began,
    )


def _refuse_own_files(layout: Layout, target: Path) -> None:
    refuse_missing_parent(target)
    target = located(target)
    if not target.exists():
        return
    files = [layout.path, *layout.files()]
    # A directory that holds a source file would be replaced together with it.
    inside = target.is_dir() and any(file.resolve().is_relative_to(target.resolve()) for file in files)
    if inside or any(os.path.samefile(target, file) for file in files):
        raise ConfigError(f"The target {str(target)!r} is part of the source. Choose another path.", file=str(target))
