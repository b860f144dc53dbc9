"""The base class of all formats of checkpoints. Its defaults are right for most formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.descriptors import read_at
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import CheckpointContent, SourcePath, is_zip
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = ["Format", "Made", "ModelForm", "TensorFormat"]

# One of the files that Hugging Face's libraries divide a model into.
_NUMBERED = re.compile(r".+-\d{5}-of-(\d{5})\.(?:safetensors|bin|pt|pth)", re.ASCII)


class Made(NamedTuple):
    """The weights to write, and what comes with them."""

    tensors: Mapping[str, TensorEntry]
    """The tensors by name."""
    notes: tuple[str, ...] = ()
    """Facts that the user should know."""
    keys: Mapping[str, bytes] = {}
    """Key-value pairs for the file, for formats that have them."""


@dataclass(frozen=True)
class ModelForm:
    """The form of a model's weights in a format. This one leaves them as they are, but for codes that are asked for.

    The calls come in this order: `named`, `dtypes`, `finished`, `stem`, `companions`, `rewritten`.
    """

    like: Path
    """The folder of the same model, for formats that need one."""

    def named(
        self, tensors: Mapping[str, TensorEntry], opened: Callable[[Path], Layout], *, by_recipe: bool = False
    ) -> Made | None:
        """Return the weights under the names that the format's readers expect; ``None`` to leave the names.

        Args:
            tensors: The weights by name.
            opened: Opens a checkpoint.
            by_recipe: Whether a recipe made the weights.

        Raises:
            ConfigError: The weights do not belong to the model.
        """
        return None

    def dtypes(self, casts: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> Mapping[str, str]:
        """Return the dtypes that tensors are cast to.

        Args:
            casts: The dtypes asked for, by name.
            tensors: The weights by name.

        Raises:
            ConfigError: The format lacks a dtype.
        """
        return casts

    def finished(
        self, tensors: Mapping[str, TensorEntry], quantize: str | None, count: Callable[[str, int], None]
    ) -> Made:
        """Return the tensors to write.

        Args:
            tensors: The weights, of the dtypes that they are written with.
            quantize: The setting of that name.
            count: Called with a name and the number of its elements that were too large for a dtype, if there are any.

        Raises:
            ConfigError: There is nothing to quantise, or numpy is missing.
        """
        if quantize in (None, "none"):
            return Made(tensors)
        from mmfsdp.checkpoint.formats.eight_bit.scaled_floats import quantized

        return Made(*quantized(tensors, quantize, count))

    def stem(self) -> str:
        """Return the text with which the names of files in a folder begin."""
        return "model"

    def companions(self, target: Path | None) -> Mapping[str, Path]:
        """Return the files that are copied beside the weights, by name.

        Args:
            target: What is replaced, if anything.

        Raises:
            ConfigError: The target holds a folder, which would be lost.
        """
        return {}

    def rewritten(self, tensors: Mapping[str, TensorEntry], quantize: str | None) -> Mapping[str, bytes]:
        """Return the content of those companions that change with the weights, by name.

        Args:
            tensors: The weights as they are written.
            quantize: The setting of that name.
        """
        return {}


class Format:
    """A format of checkpoints. The base itself stands for what was not read, such as a live model.

    A method imports what reads, writes or needs a library when it is called: every program that opens a checkpoint
    imports all formats, and needs few of their readers and writers.
    """

    name = ""
    """Its name, as ``Layout.format`` reports it."""
    description = ""
    """A description in a few words."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of a target that ask for it."""
    directory = False
    """Whether it is a directory (or its index), which gets a manifest when it is written."""
    file_names: re.Pattern[str] | None = None
    """Recognises a directory by the name of a file in it."""
    tensors_only = False
    """Whether it holds nothing but tensors."""
    by_rank = False
    """Whether it is written as a file per rank."""
    divides = False
    """Whether it divides weights among several files by their size."""
    quantizes: tuple[str, ...] = ()
    """The settings ``quantize`` that write codes into it."""
    like = ""
    """If it needs a folder to be like: what is written, as in ``'Hugging Face folder'``. It holds weights alone."""

    @property
    def reads(self) -> bool:
        """Whether it can be read."""
        return type(self).read is not Format.read

    @property
    def writes(self) -> bool:
        """Whether it can be written."""
        return type(self).plan_write is not Format.plan_write

    def recognises(self, source: SourcePath) -> bool:
        """Tell from first bytes and file names whether a path is of this format.

        What no format recognises is read by a related one that is listed before it, which tells them apart.
        """
        return self.file_names is not None and any(map(self.file_names.fullmatch, source.names))

    def read(self, source: SourcePath) -> Layout:
        """Read the layout of a checkpoint of this format; see the module that reads it for errors."""
        raise NotImplementedError

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        """Return the files that will hold the content; see the module that writes it for errors."""
        raise NotImplementedError

    def model_form(self, like: str | None, source: Path, target: Path) -> ModelForm:
        """Return the form of a model's weights, which some formats take from a folder: the form that the user gave.

        Raises:
            ConfigError: The format needs a folder, and it is neither given nor at the source or the target.
        """
        return ModelForm(Path())

    def restores_codes(self, quantize: str | None) -> bool:
        """Tell whether 8-bit codes of a source become numbers before they are written, given this setting."""
        return bool(quantize)

    def writes_bare(self, keep: str) -> bool:
        """Tell whether this part of a checkpoint lies at the top, without a key above."""
        return False

    def convert_states(self, tree: Any, layout: Layout) -> tuple[Any, tuple[str, ...]]:
        """Return content with optimizer state in the form that users of this format expect, and notes.

        Raises:
            FormatError: They expect names of parameters, which ``layout``, where the content is from, does not have.
        """
        from mmfsdp.checkpoint.state_keys import states_by_index

        return states_by_index(tree), ()

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Return what to know of a source of this format: what may belong to it, lies beside it, and is not read."""
        match = _NUMBERED.fullmatch(layout.path.name)
        if match is None or int(match[1]) < 2 or layout.path.is_dir():
            return ()
        return (f"{layout.path.name} is one of {int(match[1])} files: give the directory or the index for all tensors",)

    def refuse_part(self, layout: Layout) -> None:
        """Raise if a source holds slices of a model's tensors, which would be written as if they were whole.

        Raises:
            FormatError: It does.
        """

    def check_files(self, layout: Layout) -> None:
        """Compare the sizes of files with a manifest, if the format's own metadata cannot tell two saves apart.

        Raises:
            CheckpointError: A file is missing, or of another size.
        """

    def mapped_file(self, layout: Layout) -> Path | None:
        """Return the one archive of ``torch.save`` that torch maps into memory, and which may hold our checksums."""
        return None

    def archives(self, layout: Layout) -> Iterator[Path]:
        """Yield the archives of ``torch.save`` that hold more than the layout lists, such as pickles."""
        files = [layout.path] if layout.path.is_file() else sorted(layout.path.glob("rank*.pth"))
        for file in dict.fromkeys([*files, *layout.files()]):
            with file.open("rb") as opened:
                if is_zip(read_at(opened.fileno(), 4, 0)):
                    yield file

    def may_mix_saves(self, layout: Layout) -> bool:
        """Tell whether files of two saves could lie together unnoticed, if there is no manifest."""
        return len(list(layout.files())) > 1

    def unchecked(self, layout: Layout) -> list[str]:
        """Return what lies in a directory of this format that `verify` does not check."""
        return []


class TensorFormat(Format):
    """A format that holds nothing but tensors. Optimizer state keeps the form that it has in the source."""

    tensors_only = True
    quantizes: tuple[str, ...] = ("fp8", "fp8_channel", "fp8_tensor")

    def convert_states(self, tree: Any, layout: Layout) -> tuple[Any, tuple[str, ...]]:
        return tree, ()
