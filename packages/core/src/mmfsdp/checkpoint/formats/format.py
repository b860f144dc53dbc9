"""A format of checkpoints: its names, how it is recognised, read and written, and what differs for a conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.formats.model_forms import ModelForm
from mmfsdp.checkpoint.formats.source import Content, Source
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = ["Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of checkpoints: pure data, apart from recognising it by first bytes and file names."""

    name: str
    """Its name, as ``Layout.format`` reports it."""
    description: str
    """A description in a few words."""
    reader: Callable[[Source], Layout] | None
    """Reads it; ``None`` if it is only written."""
    sniff: Callable[[Source], bool] | None = None
    """Tells from first bytes and file names whether a path is of this format; ``None`` if the reader of a related
    format, listed before, tells them apart."""
    writer: Callable[[Content], list[PlannedFile]] | None = None
    """Plans files of this format; ``None`` if it cannot be written."""
    model_form: Callable[[Path], ModelForm] = ModelForm
    """The form of a model's weights in this format, given the folder to be like."""
    like: str = ""
    """If it needs a folder to be like: what is written, as in ``'Hugging Face folder'``. It holds weights alone."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of a target that ask for it."""
    directory: bool = False
    """Whether it is a directory (or its index), which gets a manifest when it is written."""
    tensors_only: bool = False
    """Whether it holds nothing but tensors."""
    mappable: bool = False
    """Whether it is one archive of ``torch.save``, which torch maps into memory, and which may hold our checksums."""
    by_rank: bool = False
    """Whether it has a file per rank."""
    flat: bool = False
    """Whether bare weights lie at its top, without a key above."""
    optimizer_names: bool = False
    """Whether optimizer state is keyed by parameter names rather than by numbers."""

    divides: bool = False
    """Whether it divides weights among several files by their size."""
    quantizes: tuple[str, ...] = ()
    """The settings ``quantize`` that write codes into it."""
    numbers_only: bool = False
    """Whether codes of a source are restored before they are written to it, whatever is asked for."""
    of_model: bool = False
    """Whether it is a folder in which a model's one file and the index of several may both be."""
    lone_ranks: bool = False
    """Whether it is files of ranks that do not say how many ranks there were."""
    of_dcp: bool = False
    """Whether it is a directory of DCP, whose metadata says where tensors lie in its files. It is the same after each
    step, and these files are not archives."""
    names_its_save: bool = False
    """Whether its files say which save they are of, so that those of two saves are told apart without a manifest."""

    def read(self, source: Source) -> Layout:
        """Read the layout of a checkpoint of this format; see the format's module for errors."""
        assert self.reader is not None
        return self.reader(source)

    def files_beside(self, layout: Layout) -> list[str]:
        """Return the files of ``torch.save`` in a DCP directory that are no part of it, as Lightning's ``meta.pt``.

        Args:
            layout: A checkpoint of this format.
        """
        if not self.of_dcp or is_remote(layout.path):
            return []
        names = {path.name for path in layout.path.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".ckpt")}
        return sorted(names - {"common.pt"} if "common" in layout.tree else names)  # which may need trust to be read

    def plan_write(self, content: Content) -> list[PlannedFile]:
        """Return the files that will hold the content; see the format's module for errors."""
        assert self.writer is not None
        return self.writer(content)
