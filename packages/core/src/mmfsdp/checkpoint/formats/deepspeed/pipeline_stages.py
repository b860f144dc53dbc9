"""Puts together the stages of a pipeline of DeepSpeed. Each stage has files of its own.

A stage's files have its number where other runs have 00: ``mp_rank_01_model_states.pt``. Beside them are the
weights of each layer (``layer_03-model_states.pt``), which PipelineModule names ``3.weight`` (deepspeed/runtime/pipe).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import OF_DEEPSPEED
from mmfsdp.checkpoint.formats.deepspeed.divided_params import ShardedParams
from mmfsdp.checkpoint.formats.deepspeed.rank_files import RANK_FILE, WHOLE_FILE, Files
from mmfsdp.checkpoint.formats.deepspeed.universal import UniversalParams
from mmfsdp.checkpoint.formats.torch_files.torch_zip import read_tree
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["StagedParams", "layers_of", "stages_of"]

_LAYER_FILE = re.compile(r"layer_(\d{2,9})(?:-model_00)?-model_states\.pt", re.ASCII)
_FIRST = "mp_rank_00_model_states.pt"
_EXPERT_FILE = re.compile(r"layer_.+_expert_.+|expp_rank_.+", re.ASCII)


def stages_of(folder: Path, *, trust: bool) -> list[Files]:
    """Return the files of each stage of a pipeline; without a pipeline, of the one there is.

    Raises:
        FormatError: They are of tensor or expert parallelism.
        IncompleteCheckpointError: Files of a stage are missing.
        CorruptCheckpointError: There are two files of one rank, or stages are of different saves.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(OF_DEEPSPEED))
    is_pipeline = any(_LAYER_FILE.fullmatch(name) for name in names) or _says_so(folder, names, trust=trust)
    known: dict[int, list[str]] = {0: []}
    for name in names:
        found = RANK_FILE.fullmatch(name) or WHOLE_FILE.fullmatch(name)
        if found and (is_pipeline or not int(found["stage"])):
            known.setdefault(int(found["stage"]), []).append(name)
        elif not is_pipeline or not _LAYER_FILE.fullmatch(name):
            _refuse(folder, name)
    stages = [Files(folder, known[number], stage=number, trust=trust) for number in sorted(known)]
    _check_stages(folder, stages, is_pipeline=is_pipeline)
    return stages


def _says_so(folder: Path, names: Sequence[str], *, trust: bool) -> bool:
    """Tell whether the stages of a universal checkpoint, which has no files of layers, form a pipeline."""
    if _FIRST not in names or not any(WHOLE_FILE.fullmatch(name) for name in names if name != _FIRST):
        return False
    degrees = Files(folder, [_FIRST], trust=trust).model().get("checkpoint_parallel_dimensions") or {}
    return degrees.get("tp_degree") == 1 and degrees.get("pp_degree", 1) > 1


def layers_of(folder: Path, *, trust: bool) -> dict[str, Any]:
    """Return the weights that a pipeline's files of layers hold, under the names that PipelineModule gives them."""
    found: dict[str, Any] = {}
    for name in sorted(entry.name for entry in folder.iterdir()):
        if match := _LAYER_FILE.fullmatch(name):
            path = inside(folder, name, folder)
            layer = read_tree(path, trust=trust)
            if not isinstance(layer, dict):
                raise CorruptCheckpointError(f"{name} does not hold the weights of a layer.", file=str(path))
            found |= {f"{int(match[1])}.{key}": value for key, value in layer.items()}
    return found


class StagedParams:
    """The parameters of all stages of a pipeline; of tied ones, which several stages have, the first stage's count.

    Args:
        stages: Those of each.
    """

    def __init__(self, stages: Sequence[ShardedParams | UniversalParams]) -> None:
        self._stages = stages
        self._of = {name: params for params in reversed(stages) for name in params.shapes}
        self.shapes = {name: shape for params in stages for name, shape in params.shapes.items()}
        """Their shapes."""
        self.ranks = sum(params.ranks for params in stages)
        """Number of ranks that share them."""

    def weights(self, name: str) -> TensorEntry:
        """Return the weights of a parameter in full precision."""
        return self._of[name].weights(name)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter."""
        return self._of[name].state(name)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: groups of stages with the same index and settings are one."""
        groups: list[dict[str, Any]] = []
        for params in self._stages:
            for index, group in enumerate(params.param_groups()):
                own = [name for name in group["params"] if self._of[name] is params]
                same = index < len(groups) and _settings(groups[index]) == _settings(group)
                if same:
                    groups[index]["params"] += own
                else:
                    groups.append({**group, "params": own})
        return groups

    def undivided(self) -> list[Any] | None:
        """Return the optimizer's state by rank, if its values cannot be assigned to parameters; else ``None``."""
        found = [params.undivided() for params in self._stages]
        return None if None in found else [state for states in found for state in states or ()]

    def settings(self) -> dict[str, Any]:
        """Return what DeepSpeed keeps beside the optimizer's state, such as the loss scale."""
        return self._stages[0].settings()


def _settings(group: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != "params"})


def _check_stages(folder: Path, stages: Sequence[Files], *, is_pipeline: bool) -> None:
    """Raise unless there are as many stages as the first says, all of one step."""
    numbers, first = [files.stage for files in stages], stages[0].model()
    count = first.get("mp_world_size")
    if isinstance(count, int) and count > 1 and not is_pipeline:
        _refuse(folder, next(iter(stages[0].models.values())).name)
    expected = count if isinstance(count, int) and len(stages) <= count <= 10_000 else max(numbers) + 1
    if absent := [f"mp_rank_{number:02d}_model_states.pt" for number in range(expected) if number not in numbers]:
        raise IncompleteCheckpointError(
            f"The pipeline is of {expected} stages, but {missing(absent, quoted=True)}.", file=str(folder / absent[0])
        )
    for files in stages:
        if (step := files.model().get("global_steps")) != first.get("global_steps"):
            [path, *_] = files.models.values()
            raise CorruptCheckpointError(
                f"{path.name} is of another save (step {step}) than that of the first stage (step "
                f"{first.get('global_steps')}).",
                file=str(path),
            )


def _refuse(folder: Path, name: str) -> None:
    if _EXPERT_FILE.fullmatch(name):
        what = "expert parallelism"
        way_out = (
            "For the weights as they are trained with, convert mp_rank_00_model_states.pt with "
            f"{argument('keep', 'module')}, and each layer_*_expert_*_model_states.pt, in which experts have their "
            "full names."
        )
    else:
        what = "tensor parallelism"
        way_out = (
            "Save the whole model's state dict from the run. With AutoTP, every rank calls the engine's "
            "_consolidated_16bit_state_dict(), and rank 0 saves what it returns; not save_16bit_model, which writes "
            "only the first rank's shards."
        )
    raise FormatError(
        f"{folder.name} holds {name!r}, which DeepSpeed writes for {what}. That is not supported. {way_out}",
        file=str(folder / name),
    )
