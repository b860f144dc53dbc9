"""The formats of Hugging Face's directories: a folder of a model, and files of weights with their index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import present
from mmfsdp.checkpoint.formats.common.format import Format, Made, ModelForm, TensorFormat
from mmfsdp.checkpoint.formats.common.source import (
    INDEX_SUFFIX,
    MODEL_FILES,
    TORCH_FILE,
    CheckpointContent,
    SourcePath,
    all_parts,
)
from mmfsdp.checkpoint.formats.deepspeed.format import of_deepspeed_within
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = ["HuggingFaceFormat", "SafetensorsIndexFormat", "TorchIndexFormat"]


class _ModelDirectory(Format):
    """A directory in which a model's one file, the index of several, and DeepSpeed's checkpoint may all be."""

    directory = True

    def notes(self, layout: Layout) -> tuple[str, ...]:
        notes = []
        name = layout.path.name
        if other := _weights_beside(layout):
            notes.append(f"not read: {other} of {name}, which may hold other weights than those that were read")
        if (within := of_deepspeed_within(layout.path)) is not None:
            full = "with weights in full precision and optimizer state"
            notes.append(f"{name}/{within} is DeepSpeed's, {full}, which {name} lacks")
        return tuple(notes)


def _weights_beside(layout: Layout) -> str | None:
    """Return the file that is ignored if a folder has both a model's one file and an index: it is left over."""
    if is_remote(layout.path) or not layout.path.is_dir():
        return None
    read = {file.name for file in layout.files()}
    for file, index in zip(MODEL_FILES[::2], MODEL_FILES[1::2], strict=True):
        if all(present(layout.path / name) for name in (file, index)):
            return index if file in read else file
    return None


class _FolderForm(ModelForm):
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
        """Return weights with names of the model in memory under the names of its files; None for other weights."""
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


class HuggingFaceFormat(_ModelDirectory, TensorFormat):
    """A folder that ``from_pretrained`` loads."""

    name = "huggingface"
    description = "a folder that from_pretrained of transformers loads: safetensors, config and tokenizer"
    aliases = ("hf",)
    divides = True
    like = "Hugging Face folder"

    def recognises(self, source: SourcePath) -> bool:
        return "config.json" in source.names and not {*MODEL_FILES}.isdisjoint(source.names)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.huggingface.shard_indexes import read_folder

        return read_folder(source)

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.huggingface.shard_indexes import plan_folder

        return plan_folder(content)

    def model_form(self, like: str | None, source: Path, target: Path) -> ModelForm:
        from mmfsdp.checkpoint.formats.huggingface.model_folders import like_folder

        return _FolderForm(like_folder(like, source, target, f"A {self.like}"))


class SafetensorsIndexFormat(_ModelDirectory, TensorFormat):
    """Safetensors files and their index."""

    name = "safetensors_index"
    description = "a directory of safetensors files with their index and a manifest"
    divides = True

    def recognises(self, source: SourcePath) -> bool:
        if source.head.lstrip().startswith(b"{") or any(name.endswith(INDEX_SUFFIX) for name in source.names):
            return True
        return bool(all_parts(source.names, ".safetensors"))  # whose index was lost

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.huggingface.shard_indexes import read

        return read(source)

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.huggingface.shard_indexes import plan_write

        return plan_write(content)


class TorchIndexFormat(_ModelDirectory):
    """Files of ``torch.save`` as transformers wrote them before safetensors."""

    name = "torch_index"
    description = "a directory of torch.save files of Hugging Face: pytorch_model.bin, or several and their index"

    def recognises(self, source: SourcePath) -> bool:
        if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in source.names):
            return False
        return TORCH_FILE in source.names or bool(all_parts(source.names, ".bin"))

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.huggingface.shard_indexes import read_torch

        return read_torch(source)
