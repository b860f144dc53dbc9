"""Checkpoints on disk: read the layout of any format, convert between formats; none of it imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.basics.boxes import Ranks
    from mmfsdp.checkpoint.arithmetic.averaging import average_checkpoints
    from mmfsdp.checkpoint.arithmetic.deltas import apply_delta, checkpoint_delta
    from mmfsdp.checkpoint.arithmetic.merging import merge_lora
    from mmfsdp.checkpoint.conversion.converting import ConversionReport, convert
    from mmfsdp.checkpoint.conversion.settings import Conversion
    from mmfsdp.checkpoint.files.atomic import TargetExistsError
    from mmfsdp.checkpoint.formats.opening import open_layout
    from mmfsdp.checkpoint.formats.registry import FormatInfo, known_formats
    from mmfsdp.checkpoint.inspection.comparing import ValueDifference
    from mmfsdp.checkpoint.inspection.difference import Difference, DiffReport, diff
    from mmfsdp.checkpoint.inspection.difference_page import check_page_path, diff_page, write_page
    from mmfsdp.checkpoint.inspection.summaries import TensorStatistics, TreeNode, tensor_statistics, tensor_tree
    from mmfsdp.checkpoint.inspection.verification import Problem, VerifyReport, verify
    from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, layout_of_model
    from mmfsdp.checkpoint.recipes.applying import RecipeInfo, apply_recipe, known_recipes
    from mmfsdp.checkpoint.retention import latest_checkpoint, remove_old_checkpoints
    from mmfsdp.checkpoint.tree import find_tensor

__all__ = [
    "Chunk",
    "Conversion",
    "ConversionReport",
    "DiffReport",
    "Difference",
    "FormatInfo",
    "Layout",
    "Problem",
    "Ranks",
    "RecipeInfo",
    "TargetExistsError",
    "TensorEntry",
    "TensorStatistics",
    "TreeNode",
    "ValueDifference",
    "VerifyReport",
    "apply_delta",
    "apply_recipe",
    "average_checkpoints",
    "check_page_path",
    "checkpoint_delta",
    "convert",
    "diff",
    "diff_page",
    "find_tensor",
    "known_formats",
    "known_recipes",
    "latest_checkpoint",
    "layout_of_model",
    "merge_lora",
    "open_layout",
    "remove_old_checkpoints",
    "tensor_statistics",
    "tensor_tree",
    "verify",
    "write_page",
]

_WHERE = {
    "Ranks": "mmfsdp.basics.boxes",
    **dict.fromkeys(("ConversionReport", "convert"), "mmfsdp.checkpoint.conversion.converting"),
    "average_checkpoints": "mmfsdp.checkpoint.arithmetic.averaging",
    **dict.fromkeys(("apply_delta", "checkpoint_delta"), "mmfsdp.checkpoint.arithmetic.deltas"),
    "merge_lora": "mmfsdp.checkpoint.arithmetic.merging",
    "layout_of_model": "mmfsdp.checkpoint.layout",
    "find_tensor": "mmfsdp.checkpoint.tree",
    "Conversion": "mmfsdp.checkpoint.conversion.settings",
    "TargetExistsError": "mmfsdp.checkpoint.files.atomic",
    "open_layout": "mmfsdp.checkpoint.formats.opening",
    **dict.fromkeys(("FormatInfo", "known_formats"), "mmfsdp.checkpoint.formats.registry"),
    **dict.fromkeys(("check_page_path", "diff_page", "write_page"), "mmfsdp.checkpoint.inspection.difference_page"),
    "ValueDifference": "mmfsdp.checkpoint.inspection.comparing",
    **dict.fromkeys(("DiffReport", "Difference", "diff"), "mmfsdp.checkpoint.inspection.difference"),
    **dict.fromkeys(("TensorStatistics", "tensor_statistics"), "mmfsdp.checkpoint.inspection.summaries"),
    **dict.fromkeys(("RecipeInfo", "apply_recipe", "known_recipes"), "mmfsdp.checkpoint.recipes.applying"),
    **dict.fromkeys(("TreeNode", "tensor_tree"), "mmfsdp.checkpoint.inspection.summaries"),
    **dict.fromkeys(("Problem", "VerifyReport", "verify"), "mmfsdp.checkpoint.inspection.verification"),
    **dict.fromkeys(("latest_checkpoint", "remove_old_checkpoints"), "mmfsdp.checkpoint.retention"),
    **dict.fromkeys(("Chunk", "Layout", "TensorEntry"), "mmfsdp.checkpoint.layout"),
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
