"""``diff`` sees through formats and shardings, and tells exactly what differs."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mmfsdp.basics import pip_install
from mmfsdp.basics.dtypes import DTYPES, is_floating_point, to_torch
from mmfsdp.checkpoint import Layout, convert, diff, open_layout
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks, values
from mmfsdp.checkpoint.inspection import comparing
from mmfsdp.errors import ConfigError, IncompleteCheckpointError


def save_rows(directory: Path, tensor: torch.Tensor, cuts: list[int]) -> Path:
    """Write a ``local`` checkpoint of one tensor ``state_dict/w``, cut along its first dimension."""
    directory.mkdir()
    bounds = [0, *cuts, len(tensor)]
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        offsets = [start] + [0] * (tensor.ndim - 1)
        header = {"format": "rank_local", "version": 1, "world_size": len(bounds) - 1, "rank": rank, "save_id": "a"}
        boxes = {"state_dict/w": {"shape": list(tensor.shape), "offsets": offsets}}
        piece = tensor[start:stop].clone(memory_format=torch.preserve_format)
        torch.save({"state_dict": {"w": piece}, "mmfsdp": {**header, "tensors": boxes}}, directory / f"rank{rank}.pth")
    return directory


def save(path: Path, **state: Any) -> Path:
    torch.save({"state_dict": state}, path)
    return path


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_same_weights_in_other_formats_and_shardings(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2"]))
    weight = torch.arange(rows * columns).reshape(rows, columns).to(to_torch(dtype))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows), max_size=3)))
    with tempfile.TemporaryDirectory() as folder:
        full = save(Path(folder, "full.pth"), w=weight)
        local = save_rows(Path(folder, "local"), weight, cuts)
        strided = save(Path(folder, "strided.pth"), w=weight.t().contiguous().t())
        convert(local, Path(folder, "out.safetensors"))
        for other in (local, strided, Path(folder, "out.safetensors")):
            report = diff(full, other)
            assert report.same, report
            assert report.compared == 1
        changed = weight.clone()
        changed.view(torch.uint8).view(-1)[-1] ^= 1
        report = diff(local, save(Path(folder, "changed.pth"), w=changed))
        [found] = report.values
        assert (found.name, found.elements, found.differing) == ("state_dict/w", rows * columns, 1)


def test_names_shapes_dtypes_and_values(tmp_path: Path) -> None:
    one = save(tmp_path / "a.pth", a=torch.ones(2), s=torch.ones(2, 3), t=torch.ones(4), v=torch.arange(4.0))
    two = save(tmp_path / "b.pth", b=torch.ones(2), s=torch.ones(3, 2), t=torch.ones(4).half(), v=torch.ones(4))
    report = diff(one, two)
    assert not report.same
    assert (report.scope, report.compared) == ("all", 1)
    assert (report.num_differing, report.num_tensors) == (5, 5)
    assert (report.only_in_a, report.only_in_b) == (("state_dict/a",), ("state_dict/b",))
    assert [(item.name, item.a, item.b) for item in report.shapes] == [("state_dict/s", [2, 3], [3, 2])]
    assert [(item.name, item.a, item.b) for item in report.dtypes] == [("state_dict/t", "float32", "float16")]
    [found] = report.values
    assert (found.differing, found.max_abs, found.max_rel) == (3, 2.0, 2.0)
    said = json.loads(json.dumps(report.describe(), allow_nan=False))
    assert (said["same"], said["num_differing"], said["num_tensors"]) == (False, 5, 5)
    kept = save(tmp_path / "c.pth", s=torch.ones(2, 3).half(), t=torch.ones(4), u=torch.ones(1), v=torch.ones(4))
    both = save(tmp_path / "d.pth", s=torch.ones(3, 2), t=torch.ones(4), u=torch.zeros(1))  # s differs twice
    report = diff(kept, both)
    assert (report.num_differing, report.num_tensors) == (3, 4)


def test_scopes(tmp_path: Path) -> None:
    tree = {"state_dict": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}, "meta": {"epoch": 1}}
    torch.save(tree, tmp_path / "a.pth")
    save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    report = diff(tmp_path / "a.pth", tmp_path / "b.safetensors")
    assert (report.same, report.scope, report.left_out) == (True, "model", ("a: optimizer", "a: meta"))
    torch.save({"model": tree["state_dict"]}, tmp_path / "c.pth")
    assert diff(tmp_path / "a.pth", tmp_path / "c.pth").scope == "model"

    torch.save({**tree, "meta": {"epoch": 2, "more": None}}, tmp_path / "d.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "d.pth")
    assert next((item.name, item.a) for item in report.other) == ("meta/epoch", 1)
    assert repr(report.other[1].a) == "(nothing)"
    assert diff(tmp_path / "a.pth", tmp_path / "d.pth", keep="optimizer").same
    with pytest.raises(ConfigError, match=r"nor a top-level key of a\.pth\. Did you mean 'optimizer'"):
        diff(tmp_path / "a.pth", tmp_path / "d.pth", keep="optimiser")


def test_tolerances(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    nan, inf = math.nan, math.inf
    one = save(tmp_path / "a.pth", w=torch.tensor([1.0, 100.0, nan, inf, 0.0]), i=torch.tensor([2**60, 5]))
    two = save(tmp_path / "b.pth", w=torch.tensor([1.001, 100.1, -nan, inf, -0.0]), i=torch.tensor([2**60 + 3, 5]))
    by_name = {item.name: item for item in diff(one, two).values}
    assert by_name["state_dict/w"].differing == 4  # bit by bit: the sign of a NaN, and of zero
    assert (by_name["state_dict/i"].differing, by_name["state_dict/i"].max_abs) == (1, 3.0)
    assert diff(one, two, atol=3).same
    assert {item.name for item in diff(one, two, atol=2).values} == {"state_dict/i"}
    assert diff(one, two, rtol=2e-3).same
    third = save(tmp_path / "c.pth", w=torch.tensor([1.0, 100.0, 0.0, -inf, 0.0]), i=torch.tensor([2**60, 5]))
    [found] = diff(one, third, rtol=1, atol=1000).values
    assert (found.differing, found.max_abs) == (2, inf)
    assert "inf" in json.dumps(diff(one, third).describe(), allow_nan=False)
    with pytest.raises(ConfigError, match="must be numbers of at least 0"):
        diff(one, two, rtol=-1)


def test_dtypes_as_numbers(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    weight = torch.linspace(-3, 3, 50)
    one, two = save(tmp_path / "a.pth", w=weight), save(tmp_path / "b.pth", w=weight.bfloat16())
    assert diff(one, two).dtypes
    assert diff(one, two, ignore_dtypes=True, rtol=2**-8).same
    [found] = diff(one, two, ignore_dtypes=True).values
    assert found.max_abs == (weight - weight.bfloat16().float()).abs().max().item()


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = save(tmp_path / "a.pth", w=torch.ones(9), same=torch.ones(3))
    two = save(tmp_path / "b.pth", w=torch.zeros(9), same=torch.ones(3))
    monkeypatch.setitem(sys.modules, "numpy", None)
    [found] = diff(one, two).values
    assert (found.name, found.differing, found.max_abs) == ("state_dict/w", None, None)
    assert diff(one, one).same
    with pytest.raises(ConfigError, match=re.escape(f"needs numpy. Install it with: {pip_install('mmfsdp[numpy]')}")):
        diff(one, two, atol=1)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if is_floating_point(name)])
def test_every_code_of_every_small_float_is_read_as_torch_reads_it(dtype: str) -> None:
    pytest.importorskip("numpy")
    codes = torch.arange(256, dtype=torch.uint8).repeat(8)
    expected = codes.view(to_torch(dtype)).double()
    found = torch.from_numpy(values(memoryview(codes.numpy().tobytes()), dtype).astype("float64"))
    assert torch.equal(found.nan_to_num(7.25), expected.nan_to_num(7.25))
    assert torch.equal(found.isnan(), expected.isnan())


def test_blocks_are_full_but_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(7 * 11).view(7, 11)
    source = save_rows(tmp_path / "local", weight, [1, 4])
    entry = open_layout(source).tensors["state_dict/w"]
    for item in (entry, open_layout(save(tmp_path / "t.pth", w=weight.t())).tensors["state_dict/w"]):
        with OpenFiles() as files:
            blocks = [bytes(block) for block in tensor_blocks(files, item, 64)]
        assert {len(block) for block in blocks[:-1]} == {64}
        expected = weight if item is entry else weight.t().contiguous()
        assert b"".join(blocks) == expected.numpy().tobytes()
    monkeypatch.setattr(comparing, "_ELEMENTS", 5)
    seen: list[tuple[int, int]] = []
    other = save(tmp_path / "other.pth", w=weight + 1)
    [found] = diff(source, other, progress=lambda *numbers: seen.append(numbers)).values
    assert (found.differing, found.max_abs, found.max_rel) == (77, 1.0, 1.0)
    assert seen[-1] == (77, 77)


def test_incomplete_tensors_are_an_error_and_not_a_difference(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", w=torch.ones(4))
    layout = open_layout(source)
    entry = layout.tensors["state_dict/w"]
    half = type(entry)(entry.name, entry.dtype, (8,), entry.chunks())
    broken = Layout(source, "torch_zip", 1, {entry.name: half}, layout.tree)
    with pytest.raises(IncompleteCheckpointError):
        diff(broken, broken)


class TestNames:
    def save(self, folder: Path) -> tuple[Path, Path]:
        state = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.ones(3)}
        save_file(state, folder / "a.safetensors")
        save_file({f"module.{name}": tensor for name, tensor in state.items()}, folder / "b.safetensors")
        return folder / "a.safetensors", folder / "b.safetensors"

    def test_a_prefix_is_named_and_bridged(self, tmp_path: Path) -> None:
        a, b = self.save(tmp_path)
        for one, two in ((a, b), (b, a)):
            report = diff(one, two)
            assert (report.prefix, report.compared, report.same) == ("module.", 0, False)
            bridged = diff(one, two, strip_prefix="module.")
            assert (bridged.prefix, bridged.compared, bridged.same) == ("", 2, True)

    def test_a_prefix_that_nothing_has(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"strip_prefix='modul_.' is the beginning of no name .* 'module\.'"):
            diff(*self.save(tmp_path), strip_prefix="modul_.")

    def test_names_that_would_meet(self, tmp_path: Path) -> None:
        a, b = self.save(tmp_path)
        save_file({"module.x": torch.ones(1), "x": torch.zeros(1)}, b)
        with pytest.raises(ConfigError, match=r"Without 'module.' the name 'module.x' would be that of another tensor"):
            diff(a, b, strip_prefix="module.")


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float64", "bfloat16"), ("float64", "float16")]
)
@pytest.mark.parametrize("finite", [False, True])
def test_tolerance_is_that_of_numpy_for_special_values_too(
    tmp_path: Path, dtypes: tuple[str, str], finite: bool
) -> None:
    special = [0.0, -0.0, 1.0, -1.0, 1.01, 3e38, -3e38, math.inf, -math.inf, math.nan, 65504.0, 1e-3]
    special += [1e-40, 1.4e-45, 4.2e-45, 1.5e-38]  # products of these lose digits in float32
    special = [number for number in special if finite is False or abs(number) < 7e4]
    grid = torch.tensor(list(itertools.product(special, special)), dtype=torch.float64)
    a, b = (grid[:, side].to(to_torch(dtypes[side])).contiguous() for side in (0, 1))
    save_file({"w": a}, tmp_path / "a")
    save_file({"w": b}, tmp_path / "b")
    for rtol, atol in ((1e-2, 0.0), (0.0, 1e-3), (0.5, 2.0), (0.0, 0.0), (0.5, 0.0), (1e39, 0.0), (1e-42, 1e-45)):
        wide_a, wide_b = a.double(), b.double()
        close = torch.isclose(wide_a, wide_b, rtol=rtol, atol=atol, equal_nan=True)
        ordinary = [index for index in range(len(grid)) if wide_a[index].isfinite() and wide_b[index].isfinite()]
        gap, limit = (wide_a - wide_b).abs(), atol + rtol * wide_b.abs()
        expected = sum(bool(gap[index] > limit[index]) for index in ordinary)
        expected += sum(not close[index] for index in range(len(grid)) if index not in ordinary)
        if dtypes[0] == dtypes[1] and not (rtol or atol):  # bits count: 0.0 and -0.0 differ, each NaN is itself
            bits = [side.view(torch.uint8).view(len(grid), -1) for side in (a, b)]
            expected += int(((a == b) & (bits[0] != bits[1]).any(dim=1)).sum())
        report = diff(tmp_path / "a", tmp_path / "b", rtol=rtol, atol=atol, ignore_dtypes=True, jobs=2)
        assert [item.differing for item in report.values] == [expected]


@pytest.mark.parametrize("rtol", [2**-8, 1e-2, 1.0, 1.5])
def test_numbers_right_beside_the_relative_tolerance(tmp_path: Path, rtol: float) -> None:
    given: list[dict[str, torch.Tensor]] = [{}, {}]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        b = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        for factor, step in itertools.product((1 - rtol, 1 + rtol), (-1, 0, 1)):
            a = ((b.double() * factor).to(dtype).view(bits) + step).view(dtype)
            for place in range(len(b)):  # each in a tensor of its own, so that no other one makes it be looked at
                name = f"{dtype}.{factor}.{step}.{place}"
                given[0][name], given[1][name] = b.clone(), b.clone()
                given[0][name][place] = a[place]
    for path, tensors in zip(("a", "b"), given, strict=True):
        save_file(tensors, tmp_path / path)
    pairs = {name: (given[0][name].double(), given[1][name].double()) for name in given[0]}
    expected = {name: 1 for name, (one, two) in pairs.items() if not ((one - two).abs() <= rtol * two.abs()).all()}
    assert 50 < len(expected) < len(pairs) - 50
    report = diff(tmp_path / "a", tmp_path / "b", rtol=rtol, jobs=1)
    assert {item.name: item.differing for item in report.values} == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rtol", [2**-7, 1e-2, 0.03, 0.7])
def test_every_16_bit_float_beside_its_neighbours(tmp_path: Path, dtype: torch.dtype, rtol: float) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32)
    shifts = (-100, -65, -11, -4, -3, -2, -1, 0, 1, 2, 3, 4, 11, 65, 100)
    b = words.to(torch.int16).view(dtype)
    moved = {f"{shift}": (words + shift).to(torch.int16).view(dtype) for shift in shifts}
    save_file(moved, tmp_path / "a")
    save_file({name: b.clone() for name in moved}, tmp_path / "b")
    expected = {}
    for name, a in moved.items():
        gap, limit = (a.double() - b.double()).abs(), rtol * b.double().abs()
        close = (gap.isfinite() & (gap <= limit)) | (a == b) | (a.isnan() & b.isnan())
        expected[name] = int((~close).sum())
    report = diff(tmp_path / "a", tmp_path / "b", rtol=rtol, jobs=1)
    assert {item.name: item.differing for item in report.values} == {name: n for name, n in expected.items() if n}
