"""Finds the layers of a model that a checkpoint would leave at their initial values, though it seems to hold them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from mmfsdp.basics.codes import scales_of
from mmfsdp.basics.text import compile_pattern
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.state.lazy_tensors import LazyTensor

__all__ = ["left_initial", "module_globs", "without_patterns"]

_Shapes = Mapping[str, Sequence[int]]

_LAYER = re.compile(r"(?P<list>.*?)(?P<number>(?:^|(?<=\.))\d+)\.(?P<rest>.+)")
_COMPUTED = ("inv_freq", "masked_bias", "num_batches_tracked", "position_ids")
_NUMBERS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def left_initial(
    params: Collection[Sequence[str]], shapes: _Shapes, weights: Mapping[str, LazyTensor] | Mapping[str, TensorEntry]
) -> list[str]:
    """Return the parameters that would stay initial by mistake. Not collective.

    New heads, adapters and parts that come from another checkpoint stay initial on purpose. So a missing parameter of a
    list's layer counts only where one of these is so:

    - the layer is missing as a whole, and other layers of its list are there;
    - the checkpoint has as many numbers in the same layer that the model does not take, as with experts that it holds
      one by one and the model as a stack;
    - the checkpoint has the list under another name, with the same shapes.

    Args:
        params: Each parameter's names, the tied ones included.
        shapes: The shapes of all that the model has, by name.
        weights: The checkpoint's weights under the model's names.
    """
    missing = [names[0] for names in params if not any(name in weights for name in names)]
    scales = {*scales_of(weights).values()}
    others = [name for name, value in weights.items() if name not in shapes and name not in scales]
    spare = {name: weights[name].shape for name in others if _is_weight(name, weights[name])}
    if not missing:
        return []
    wanted = {name: shapes[name] for name in missing}
    found = [name for names in params for name in names if name in weights]
    return [
        *dict.fromkeys(
            [
                *_of_lost_layers(missing, found, weights),
                *_of_layers_with_others(wanted, spare),
                *_of_renamed_lists(wanted, spare),
            ]
        )
    ]


def without_patterns(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that no pattern matches, neither as a whole nor as the module that they are in.

    Raises:
        ConfigError: A pattern is malformed.
    """
    compiled = [compile_pattern(pattern) for pattern in patterns]

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(each.fullmatch(".".join(parts[:end])) for each in compiled for end in range(1, len(parts) + 1))

    return [name for name in names if not matches(name)]


def module_globs(names: Iterable[str]) -> list[str]:
    """Return the modules of parameters, each list's layers as one glob: ``layers.*.mlp``."""
    modules = (name.rpartition(".")[0] or name for name in names)
    return [*dict.fromkeys(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", module) for module in modules)]


def _is_weight(name: str, value: LazyTensor | TensorEntry) -> bool:
    """Whether a tensor may be trained: not a mask, a table of positions or a count."""
    is_mask = len(value.shape) > 2 and value.shape[0] == 1
    return str(value.dtype).removeprefix("torch.") in _NUMBERS and not is_mask and not name.endswith(_COMPUTED)


def _layer(name: str) -> str | None:
    match = _LAYER.match(name)
    return match and match["list"] + match["number"]


def _glob(name: str) -> str:
    return re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name)


def _of_lost_layers(missing: Iterable[str], found: Iterable[str], weights: Collection[str]) -> list[str]:
    there = {_layer(name) for name in weights}
    globs = {_glob(name) for name in found}
    lost: defaultdict[str, list[str]] = defaultdict(list)
    for name in missing:
        layer = _layer(name)
        if layer is not None and layer not in there:
            lost[layer].append(name)
    result: list[str] = []
    for names in lost.values():
        modules = {match["rest"].rpartition(".")[0] for match in map(_LAYER.match, names) if match}
        # A list of plain modules, such as a head of linear layers, may well be longer than the checkpoint's.
        if len(modules) > 1 and "" not in modules and all(_glob(name) in globs for name in names):
            result += names
    return result


def _of_layers_with_others(wanted: _Shapes, spare: _Shapes) -> list[str]:
    def by_layer(shapes: _Shapes) -> dict[str, list[str]]:
        layers: defaultdict[str, list[str]] = defaultdict(list)
        for name in shapes:
            if (layer := _layer(name)) is not None:
                layers[layer].append(name)
        return layers

    result: list[str] = []
    others = by_layer(spare)
    for layer, names in by_layer(wanted).items():
        matrices, rest = _counted(wanted, names)
        other_matrices, other_rest = _counted(spare, others.get(layer, []))
        if 0 < matrices <= other_matrices or (not matrices and rest.total() and rest <= other_rest):
            result += names
    return result


def _counted(shapes: _Shapes, names: Iterable[str]) -> tuple[int, Counter[int]]:
    """Return the number of elements in matrices, and how many vectors there are of each size."""
    matrices = sum(math.prod(shapes[name]) for name in names if len(shapes[name]) > 1)
    return matrices, Counter(math.prod(shapes[name]) for name in names if len(shapes[name]) < 2)


def _of_renamed_lists(wanted: _Shapes, spare: _Shapes) -> list[str]:
    there = {(match["number"], match["rest"], *spare[name]) for name in spare if (match := _LAYER.match(name))}
    lists: defaultdict[str, list[str]] = defaultdict(list)
    renamed: Counter[str] = Counter()
    for name in wanted:
        if match := _LAYER.match(name):
            lists[match["list"]].append(name)
            renamed[match["list"]] += (match["number"], match["rest"], *wanted[name]) in there
    return [name for path, names in lists.items() if 2 * renamed[path] > len(names) for name in names]
