"""Sketches of boxes add up to those of whole tensors, and their distance is that of the tensors."""

from __future__ import annotations

import math

import pytest
import torch

from mmfsdp.parity.records.writing import Scaled, texts_of
from mmfsdp.parity.sketching.figures import BITS, Figures, add, cosine, distance, factor, where
from mmfsdp.parity.sketching.geometries import geometry_of
from mmfsdp.parity.sketching.sketches import Sketches, sketch_of

SHAPES = [(), (1,), (1000,), (7, 5), (64, 32, 3, 3), (4, 100, 16), (3, 0, 2)]
SHAPES += [(9001,), (300, 257), (48, 768), (40, 96, 3, 5)]  # of more elements than have signs of their own
ids = str


def figures(tensor: torch.Tensor, offsets: list[int] | None = None, shape: tuple[int, ...] | None = None) -> Figures:
    whole = tuple(tensor.shape) if shape is None else shape
    return Figures.of(sketch_of(tensor, offsets or [0] * tensor.dim(), whole).tolist())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_figures_are_those_of_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    found = figures(tensor)
    assert found.total == pytest.approx(tensor.double().sum().item(), abs=1e-4)
    assert found.norm == pytest.approx(tensor.double().norm().item(), rel=1e-5)
    if tensor.numel():
        assert (found.low, found.high) == (tensor.min().item(), tensor.max().item())
        assert found.largest == tensor.abs().max().item()


@pytest.mark.parametrize(("shape", "dim"), [(shape, dim) for shape in SHAPES for dim in range(len(shape))], ids=ids)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_boxes_add_up(shape: tuple[int, ...], dim: int, parts: int) -> None:
    tensor = torch.randn(shape)
    boxes, start = [], 0
    for chunk in tensor.chunk(parts, dim):
        offsets = [start if axis == dim else 0 for axis in range(len(shape))]
        boxes.append(figures(chunk, offsets, shape))
        start += chunk.shape[dim]
    whole, found = figures(tensor), add(boxes)
    assert distance(found, whole) <= 1e-6 * max(whole.norm, 1e-30)
    assert found.norm == pytest.approx(whole.norm, rel=1e-5)
    assert found.placed == pytest.approx(whole.placed, abs=1e-5 * max(whole.norm, 1))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 32, 9, 9)], ids=ids)
@pytest.mark.parametrize("count", [1, 2])
def test_the_order_in_memory_does_not_matter(shape: tuple[int, ...], count: int) -> None:
    tensors, found = [torch.randn(shape) for _ in range(count)], []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        boxes = [tensor.contiguous(memory_format=memory_format) for tensor in tensors]
        sketches = Sketches()
        sketches.add_all([(box, geometry_of(box, (0,) * len(shape), shape)) for box in boxes])
        found.append(sketches.take())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (64, 128), (300, 257)], ids=ids)
def test_tensors_can_still_be_resized(shape: tuple[int, ...]) -> None:
    """FSDP frees the storages of whole parameters by resizing them."""
    tensor = torch.randn(shape)
    figures(tensor)
    assert tensor.untyped_storage().resizable()


def test_grids_of_boxes_add_up() -> None:
    tensor = torch.randn(12, 10)
    boxes = [figures(tensor[i : i + 4, j : j + 5], [i, j], (12, 10)) for i in (0, 4, 8) for j in (0, 5)]
    whole = figures(tensor)
    assert distance(add(boxes), whole) < 1e-6 * whole.norm


@pytest.mark.parametrize("inner", [(6,), (3, 5)], ids=ids)
def test_samples_that_are_dealt_out_add_up(inner: tuple[int, ...]) -> None:
    tensor = torch.randn(8, *inner)
    shape = (4, 2, 1, *inner)
    parts = [
        Figures.of(
            sketch_of(
                tensor[rank::2].reshape(4, 1, 1, *inner), [0, rank, 0, *[0] * len(inner)], shape, leading=3
            ).tolist()
        )
        for rank in range(2)
    ]
    whole, found = figures(tensor), add(parts)
    assert distance(found, whole) < 1e-6 * whole.norm
    assert found.placed == pytest.approx(whole.placed, abs=1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_dtypes(dtype: torch.dtype) -> None:
    tensor = (torch.randn(40, 30) * 3).to(dtype)
    assert figures(tensor).norm == pytest.approx(tensor.double().norm().item(), rel=1e-5)


def test_complex_numbers() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    assert figures(tensor).norm == pytest.approx(tensor.norm().item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(64, 48), (64, 96), (512, 256)], ids=ids)
@pytest.mark.parametrize("change", ["noise", "row", "bias", "permuted", "one element"])
def test_the_distance_is_estimated(change: str, shape: tuple[int, int]) -> None:
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        one = torch.randn(shape)
        other = one.clone()
        if change == "noise":
            other += 1e-3 * torch.randn_like(one)
        elif change == "row":
            other[seed] += torch.randn(shape[1])
        elif change == "bias":
            other += torch.randn(shape[1])
        elif change == "permuted":
            other = one[torch.randperm(shape[0])]
        else:
            other[seed, 4] += 1
        ratios.append(distance(figures(one), figures(other)) / (one - other).norm().item())
    assert all(0.6 < ratio < 1.5 for ratio in ratios), ratios
    assert 0.85 < sum(ratios) / len(ratios) < 1.15


def test_factors_are_exact() -> None:
    tensor = torch.randn(50, 20)
    best, rest = factor(figures(tensor), figures(tensor * 2))
    assert best == pytest.approx(2, rel=1e-6)
    assert rest < 1e-6
    assert cosine(figures(tensor), figures(-tensor)) == pytest.approx(-1)


@pytest.mark.parametrize("shape", [(128, 8), (128, 128), (128, 256)], ids=ids)
def test_swapped_rows_are_noticed(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape)
    for row in range(127):
        other = tensor.clone()
        other[[row, row + 1]] = other[[row + 1, row]]
        assert distance(figures(tensor), figures(other)) > 0.3 * (tensor - other).norm()


def test_where_a_difference_lies() -> None:
    one = torch.randn(100, 30)
    other = one.clone()
    other[-2:] = 0
    center, spread = where(figures(one), figures(other))
    assert center == pytest.approx(0.985, abs=0.02)
    assert spread < 0.03


def test_autocast_does_not_change_sketches() -> None:
    tensor = torch.randn(300, 64)
    found = figures(tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert figures(tensor) == found


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_norms_whose_squares_single_precision_cannot_hold(size: float) -> None:
    tensor = torch.randn(100, 100) * size
    assert figures(tensor).norm == pytest.approx(tensor.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("factor", [0.25, 0.123, -1.0])
def test_tensors_that_were_multiplied_are_derived(factor: float) -> None:
    before, scaled, sketches = torch.randn(100, 100), Scaled(), Sketches()
    row = sketches.add(before, geometry_of(before, (0, 0), (100, 100)))
    scaled.remember("weight", before, row, sketches.square(row))
    after = before * factor
    found = scaled.find("weight", after)
    assert found is not None
    sketches.add_scaled(*found)
    _, derived = (Figures.of(row.tolist()) for row in sketches.take())
    truth = figures(after)
    assert distance(derived, truth) < 1e-6 * truth.norm
    assert (derived.total, derived.square) == pytest.approx((truth.total, truth.square), rel=1e-5)
    assert (derived.low, derived.high) == pytest.approx((truth.low, truth.high), rel=1e-6)


def test_other_changes_than_a_factor_are_seen() -> None:
    before, scaled = torch.randn(100, 100), Scaled()
    scaled.remember("weight", before, 0, before.double().square().sum().item())
    assert scaled.find("bias", before) is None
    for change in ("row", "swapped", "half", "noise"):
        after = before * 0.5
        if change == "row":
            after[3] = 0
        elif change == "swapped":
            after[[1, 2]] = after[[2, 1]]
        elif change == "half":
            after[50:] *= 2
        else:
            after += 1e-4 * torch.randn_like(after)
        assert scaled.find("weight", after) is None


def packed(tensor: torch.Tensor) -> str:
    [text] = texts_of(sketch_of(tensor, [0] * tensor.dim(), tensor.shape)[None])
    return text


def test_numbers_that_are_not_finite_are_counted() -> None:
    tensor = torch.randn(10, 10)
    tensor[2] = math.nan
    tensor[3, 0] = math.inf
    found = figures(tensor)
    assert found.odd == 11
    assert distance(found, figures(torch.randn(10, 10))) == math.inf
    assert Figures.unpack(packed(tensor)).odd == 11


def test_text_keeps_the_figures() -> None:
    tensor = torch.randn(30, 40)
    text = packed(tensor)
    found, again = figures(tensor), Figures.unpack(text)
    assert again.sketch == found.sketch
    assert again.placed == pytest.approx(found.placed, rel=1e-6)
    assert len(again.sketch) == BITS
    with pytest.raises(ValueError, match="holds no figures"):
        Figures.unpack(text[:-8])
