"""Random trees, cut into random shards, come through random chains of formats without a changed bit."""

from __future__ import annotations

import itertools
import math
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.basics.dtypes import DTYPES, to_torch
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import FormatError

NAMES = [name for name, (_, code) in DTYPES.items() if code is not None and "_x" not in name]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Draw tensors by name, and at which rows each is cut into the same number of shards."""
    world_size = draw(st.integers(1, 4))
    tensors, cuts = {}, {}
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(NAMES))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=3))
        size = math.prod(shape) * DTYPES[dtype][0]
        seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=seed)
        name = f"layer.{index}.{draw(st.sampled_from(['kernel', 'bias', 'ä b']))}"
        tensors[name] = raw.view(to_torch(dtype)).reshape(shape) if size else torch.zeros(shape, dtype=to_torch(dtype))
        if draw(st.booleans()) and len(shape) > 1:
            tensors[name] = tensors[name].transpose(0, 1).contiguous().transpose(0, 1)
        if shape and draw(st.booleans()):
            inner = st.lists(st.integers(0, shape[0]), min_size=world_size - 1, max_size=world_size - 1)
            cuts[name] = [0, *sorted(draw(inner)), shape[0]]
    for name in tensors:
        cuts.setdefault(name, [])
    return tensors, {"": [world_size], **cuts}


def write(directory: Path, tensors: dict[str, torch.Tensor], cuts: dict[str, list[int]]) -> Path:
    directory.mkdir()
    [world_size] = cuts[""]
    for rank in range(world_size):
        boxes: dict[str, Any] = {}
        local = {}
        for name, tensor in tensors.items():
            local[name] = tensor
            if cuts[name]:
                start, stop = list(itertools.pairwise(cuts[name]))[rank]
                local[name] = tensor[start:stop].clone(memory_format=torch.preserve_format)
                offsets = [start] + [0] * (tensor.ndim - 1)
                boxes[f"state_dict/{name}"] = {"shape": list(tensor.shape), "offsets": offsets}
        header = {"format": "rank_local", "version": 1, "world_size": world_size, "rank": rank, "save_id": "a"}
        torch.save({"state_dict": local, "mmfsdp": {**header, "tensors": boxes}}, directory / f"rank{rank}.pth")
    return directory


FORMATS: list[dict[str, Any]] = [
    {"to": "pth"},
    {"to": "safetensors"},
    {"to": "safetensors_index", "max_shard_size": 50},
    *({"to": "dcp", "ranks": ranks} for ranks in (1, 2, 3, "2x2")),
    *({"to": "local", "ranks": ranks} for ranks in (1, 2, 5, "2x2")),
]


@settings(max_examples=30, deadline=None)
@given(checkpoints(), st.lists(st.sampled_from(FORMATS), min_size=1, max_size=4))
def test_chains(case: tuple[dict[str, torch.Tensor], dict[str, list[int]]], chain: list[dict[str, Any]]) -> None:
    tensors, cuts = case
    with tempfile.TemporaryDirectory() as folder:
        origin = current = write(Path(folder, "origin"), tensors, cuts)
        for step, options in enumerate([*chain, {"to": "pth"}]):
            target = Path(folder, f"step{step}")
            convert(current, target, **options, keep="model", verify_output=True, fsync=False)
            checked = verify(target)
            assert (checked.ok, checked.unchecked) == (True, ())
            report = diff(origin, target, keep="model")
            assert report.same, report
            assert report.compared == len(tensors)
            current = target
            if options["to"] == "dcp":
                check(tensors, loaded_by_torch(target, tensors))
        check(tensors, torch.load(current, weights_only=True)["state_dict"])


def loaded_by_torch(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    content = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.load(content, checkpoint_id=directory)
    return content


def check(tensors: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        one, two = (item.contiguous().view(-1) for item in (loaded[name], tensor))
        assert tensor.numel() == 0 or torch.equal(one.view(torch.uint8), two.view(torch.uint8))


KEYS = st.sampled_from(["a", "b.c", "weight", "ä", "0", "x y"])
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5),
    st.binary(max_size=5), st.complex_numbers(allow_nan=False), st.tuples(st.integers(), st.text(max_size=3)),
    st.frozensets(st.integers(0, 9), max_size=3), st.dictionaries(st.integers(0, 9), st.integers(), max_size=3),
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Draw nested content: tensors that share storage among plain values, in dicts, lists and tuples."""
    store = torch.arange(60.0)
    views = [store[:12], store[:12].view(3, 4), store[20:41].view(7, 3).t(), store[5], store[:0], store[50:], store]
    leaves = st.one_of(PLAIN, st.sampled_from(views), st.just(torch.tensor([1, 2, 3])))
    nested = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=4),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(KEYS, nested, min_size=1, max_size=4))


@pytest.mark.exhaustive
@settings(max_examples=30, deadline=None)
@given(trees(), st.lists(st.sampled_from([form for form in FORMATS if "safe" not in form["to"]]), max_size=4))
def test_chains_of_everything(tree: dict[str, Any], chain: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder, "origin.pth")
        torch.save(tree, current)
        for step, options in enumerate([*chain, {"to": "pth"}]):
            target = Path(folder, f"step{step}")
            if options["to"] == "dcp" and ambiguous(tree):
                with pytest.raises(FormatError, match="joined with dots"):
                    convert(current, target, **options, keep="all")
                return
            convert(current, target, **options, keep="all", verify_output=True, fsync=False)
            current = target
        assert same(torch.load(current, weights_only=False), tree)  # frozensets are no plain data to torch


def ambiguous(tree: dict[str, Any]) -> bool:
    """Tell whether two paths are one name for DCP: ``'b.c'`` and ``{'b': {'c': ...}}``."""
    return len({*flattened(tree)}) < len([*flattened(tree)])


def flattened(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and (all(isinstance(key, str) for key in value)):
        for key, child in value.items():
            yield from flattened(child, f"{path}.{key}")
    elif isinstance(value, list) and divides(value):
        for index, child in enumerate(value):
            yield from flattened(child, f"{path}.{index}")
    else:
        yield path


def divides(value: list[Any]) -> bool:
    return any(
        isinstance(child, torch.Tensor | dict) or (isinstance(child, list) and divides(child)) for child in value
    )


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return {*one} == {*two} and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and bool(one == two)


@settings(max_examples=25, deadline=None)
@given(checkpoints(), st.data())
def test_one_changed_byte_is_one_difference(
    case: tuple[dict[str, torch.Tensor], dict[str, list[int]]], data: st.DataObject
) -> None:
    tensors, cuts = case
    full = [name for name, tensor in tensors.items() if tensor.numel()]
    if not full:
        return
    with tempfile.TemporaryDirectory() as folder:
        origin = write(Path(folder, "origin"), tensors, cuts)
        convert(origin, Path(folder, "copy.safetensors"), fsync=False)
        name = data.draw(st.sampled_from(full))
        [chunk] = open_layout(Path(folder, "copy.safetensors")).tensors[name].chunks()
        raw = bytearray(Path(folder, "copy.safetensors").read_bytes())
        raw[chunk.offset + data.draw(st.integers(0, chunk.nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
        Path(folder, "copy.safetensors").write_bytes(raw)
        [found] = diff(origin, Path(folder, "copy.safetensors")).values
        assert (found.name, found.differing) == (name, 1)
