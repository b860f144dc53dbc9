"""The forms in which formats write a model's weights: names, dtypes, codes, and files beside them.

Each imports what it needs when it is used: most conversions need none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.layout import Layout

if TYPE_CHECKING:
    from mmfsdp.checkpoint.formats.gguf.llama_models import GgufModel

__all__ = ["FolderForm", "LlamaFileForm", "Made", "ModelForm"]


class Made(NamedTuple):
    """The weights as they are written, and what comes with them."""

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
            ConfigError: The weights are not those of the model.
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
        from mmfsdp.checkpoint.formats.eight_bit.kinds import quantized

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


class FolderForm(ModelForm):
    """A Hugging Face folder: names of its model, tied weights once, its config and tokenizer beside the weights."""

    def named(
        self, tensors: Mapping[str, TensorEntry], opened: Callable[[Path], Layout], *, by_recipe: bool = False
    ) -> Made:
        from mmfsdp.checkpoint.formats.huggingface.weight_names import own_weights, without_ties

        own = own_weights(self.like, opened)
        renamed = self._in_files(tensors, own)
        kept, notes = without_ties(renamed or tensors, self.like, own, by_recipe=by_recipe)
        told = ("Weights have the names and shapes of files, by the table of transformers for this model",)
        return Made(kept, (*notes, *(told if renamed else ())))

    def _in_files(
        self, tensors: Mapping[str, TensorEntry], own: Mapping[str, TensorEntry]
    ) -> Mapping[str, TensorEntry] | None:
        """Return weights that have the names of the model in memory as its files have them; None for others."""
        if all(name in tensors for name in own) or all(name in own for name in tensors):
            return None
        from mmfsdp.checkpoint.formats.huggingface.memory_names import as_in_files, described_model

        model = described_model(self.like)
        return None if model is None else as_in_files(model, tensors, own)

    def finished(
        self, tensors: Mapping[str, TensorEntry], quantize: str | None, count: Callable[[str, int], None]
    ) -> Made:
        from mmfsdp.checkpoint.formats.huggingface.model_folders import dtype_notes

        notes = dtype_notes(tensors, self.like, quantize)
        made = super().finished(tensors, quantize, count)
        return made._replace(notes=(*notes, *made.notes))

    def stem(self) -> str:
        from mmfsdp.checkpoint.formats.huggingface.model_folders import weights_stem

        return weights_stem(self.like)

    def companions(self, target: Path | None) -> Mapping[str, Path]:
        from mmfsdp.checkpoint.formats.huggingface.model_folders import companions

        return companions(self.like, target)

    def rewritten(self, tensors: Mapping[str, TensorEntry], quantize: str | None) -> Mapping[str, bytes]:
        if not quantize:
            return {}
        from mmfsdp.checkpoint.formats.huggingface.model_folders import CONFIG, quantized_config

        return {CONFIG: quantized_config(self.like, tensors, quantize)}


class LlamaFileForm(ModelForm):
    """A GGUF file of a Llama-like model: names, order of rows and tokenizer as llama.cpp has them."""

    @cached_property
    def _model(self) -> GgufModel:
        from mmfsdp.checkpoint.formats.gguf.llama_models import GgufModel

        return GgufModel.of(self.like)

    def named(
        self, tensors: Mapping[str, TensorEntry], opened: Callable[[Path], Layout], *, by_recipe: bool = False
    ) -> Made:
        return Made(*self._model.renamed(tensors))

    def dtypes(self, casts: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> Mapping[str, str]:
        return self._model.dtypes(casts, tensors)

    def finished(
        self, tensors: Mapping[str, TensorEntry], quantize: str | None, count: Callable[[str, int], None]
    ) -> Made:
        made, keys, notes = self._model.finished(tensors, quantize, count)
        return Made(made, notes, keys)
