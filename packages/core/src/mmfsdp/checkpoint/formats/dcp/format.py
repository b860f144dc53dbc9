"""The formats of directories of torch's distributed checkpoint (DCP): its own, Megatron-Core's, and FSDP1's parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.source import CheckpointContent, SourcePath
from mmfsdp.checkpoint.layout import Layout, PlannedFile
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest

__all__ = ["DcpFlatFormat", "DcpFormat", "MegatronFormat"]


class _DcpDirectory(Format):
    """A directory of DCP. Its metadata, which is the same after each step, says where tensors lie in its files."""

    directory = True

    def notes(self, layout: Layout) -> tuple[str, ...]:
        if not (others := _files_beside(layout)):
            return ()
        remedy = "common.pt is read with trust" if "common.pt" in others else "convert such a file by itself"
        return (f"not read, as no part of the DCP directory: {name_list(others, 3)}; {remedy}",)

    def check_files(self, layout: Layout) -> None:
        # The sizes of files often tell two saves apart, and cost nothing to check.
        if (layout.path / MANIFEST_NAME).exists():
            check_manifest(layout.path)

    def archives(self, layout: Layout) -> Iterator[Path]:
        return iter(())  # its files consist of archives, which the layout lists

    def may_mix_saves(self, layout: Layout) -> bool:
        return True

    def unchecked(self, layout: Layout) -> list[str]:
        others = _files_beside(layout)
        return [f"what is no part of the DCP directory: {name_list(others, 3)}"] if others else []


def _files_beside(layout: Layout) -> list[str]:
    """Return the files of ``torch.save`` in a DCP directory that are no part of it, as Lightning's ``meta.pt``."""
    if is_remote(layout.path):
        return []
    names = {path.name for path in layout.path.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".ckpt")}
    return sorted(names - {"common.pt"} if "common" in layout.tree else names)  # which may need trust to be read


class MegatronFormat(_DcpDirectory):
    """A checkpoint of Megatron-Core."""

    name = "megatron"
    description = (
        "a directory of Megatron-Core's torch_dist: DCP with metadata.json, and optimizer state by other names"
    )

    def recognises(self, source: SourcePath) -> bool:
        return ".metadata" in source.names and "metadata.json" in source.names

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.dcp.megatron import read

        return read(source)


class DcpFlatFormat(_DcpDirectory):
    """Parts of FSDP1's flat parameters. The reader of ``dcp`` recognises them."""

    name = "dcp_flat"
    description = "a DCP directory of FSDP1's local state dicts: parts of flat parameters"

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.dcp.flat import read

        return read(source)


class DcpFormat(_DcpDirectory):
    """A checkpoint of DCP. Bare weights lie at its top, and optimizer state has the names of parameters."""

    name = "dcp"
    description = "a directory of torch's distributed checkpoint (DCP), with a manifest"
    aliases = ("sharded",)
    by_rank = True

    def recognises(self, source: SourcePath) -> bool:
        return ".metadata" in source.names

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.dcp.metadata import holds_flat_parameters, read_as_stored
        from mmfsdp.checkpoint.formats.dcp.rules import read_by_rules

        layout = (None if source.look_up else read_by_rules(source)) or read_as_stored(source)
        return DcpFlatFormat().read(source) if holds_flat_parameters(layout) else layout

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.dcp.writer import plan_write

        return plan_write(content)

    def writes_bare(self, keep: str) -> bool:
        return keep == "model"

    def convert_states(self, tree: Any, layout: Layout) -> tuple[Any, tuple[str, ...]]:
        from mmfsdp.checkpoint.state_keys import states_by_name

        return states_by_name(tree, layout)
