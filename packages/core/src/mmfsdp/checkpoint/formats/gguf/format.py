"""The format of GGUF files, and the form of a model's weights in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.format import Made, ModelForm, TensorFormat
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.layout import Layout, PlannedFile

if TYPE_CHECKING:
    from mmfsdp.checkpoint.formats.gguf.llama_models import GgufModel

__all__ = ["GgufFormat"]


class _LlamaFileForm(ModelForm):
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


class GgufFormat(TensorFormat):
    """A GGUF file. It is only written."""

    name = "gguf"
    description = "a GGUF file of a Llama-like model, which llama.cpp loads"
    suffixes = (".gguf",)
    like = "GGUF file"
    quantizes = ("q8_0",)

    def model_form(self, like: str | None, source: Path, target: Path) -> ModelForm:
        from mmfsdp.checkpoint.formats.huggingface.model_folders import like_folder

        return _LlamaFileForm(like_folder(like, source, target, f"A {self.like}"))

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.gguf.gguf_files import plan_write

        return plan_write(content)

    def restores_codes(self, quantize: str | None) -> bool:
        return True
