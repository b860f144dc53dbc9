"""Averages are those of float64, rounded once; checkpoints that do not match are refused with their names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import average_checkpoints, convert, open_layout
from mmfsdp.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError

np = pytest.importorskip("numpy")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(dtype: torch.dtype, steps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(steps)
    return {
        "layer.weight": (torch.randn(301, 257, generator=generator) * 3).to(dtype),
        "layer.scale": torch.randn((), generator=generator).to(dtype),
        "layer.none": torch.zeros(0, 3, dtype=dtype),
        "norm.num_batches_tracked": torch.tensor(steps),
        "index": torch.arange(12).reshape(3, 4),
    }


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Three checkpoints: a ``.pth`` file, a DCP directory of three ranks, and a safetensors file."""
    paths = [tmp_path / f"epoch_{index}.pth" for index in range(3)]
    for index, (path, dtype) in enumerate(zip(paths, DTYPES, strict=True)):
        torch.save({"state_dict": weights(dtype, index), "meta": {"epoch": index}, "optimizer": {"state": {}}}, path)
    convert(paths[1], tmp_path / "epoch_1", to="dcp", ranks=3, keep="model")
    save_file(weights(DTYPES[2], 2), tmp_path / "epoch_2.safetensors")
    return [paths[0], tmp_path / "epoch_1", tmp_path / "epoch_2.safetensors"]


def reference(name: str, factors: Sequence[float], total: float) -> Any:
    """The formula of the docstring in numpy's float64."""
    given = [weights(dtype, index)[name].double().numpy() for index, dtype in enumerate(DTYPES)]
    added = np.zeros(given[0].shape)
    for factor, tensor in zip(factors, given, strict=True):
        added = added + factor * tensor
    return added / total


def rounded(wide: Any, dtype: torch.dtype) -> torch.Tensor:
    """Round once: among a number of the dtype and its neighbours, the one that is nearest, ties to even, exactly."""
    near = torch.from_numpy(np.array(wide)).to(dtype).flatten()
    bits = near.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    result = bits.clone()
    flat = wide.reshape(-1)
    # Only numbers that lie almost half way between two can have been rounded wrongly by way of float32.
    for place in range(len(flat)):
        choices = [int(bits[place]) + step for step in (-1, 0, 1)]
        numbers = torch.tensor(choices, dtype=torch.int32).to(bits.dtype).view(dtype).double().tolist()
        exact = Fraction(float(flat[place]))
        _, _, best = min(
            (abs(Fraction(number) - exact), code % 2, code) for number, code in zip(numbers, choices, strict=True)
        )
        result[place] = best
    return result.view(dtype).reshape(wide.shape)


@pytest.mark.parametrize(
    ("options", "factors", "total"),
    [
        ({}, (1.0, 1.0, 1.0), 3.0),
        ({"weights": [0.5, 0.3, 0.2]}, (0.5, 0.3, 0.2), math.fsum((0.5, 0.3, 0.2))),
        ({"weights": [1, 1, -1]}, (1.0, 1.0, -1.0), 1.0),
        ({"ema": 0.9}, (0.9**2, (1 - 0.9) * 0.9, 1 - 0.9), 1.0),
    ],
)
def test_equals_float64_rounded_once(
    sources: list[Path], tmp_path: Path, options: dict[str, Any], factors: Sequence[float], total: float
) -> None:
    report = average_checkpoints(sources, tmp_path / "wide.safetensors", dtype="float64", **options)
    assert report.tensors == 5
    assert report.bytes_read > 2 * report.bytes / 4
    found = load_file(tmp_path / "wide.safetensors")
    for name in ("layer.weight", "layer.scale"):
        assert np.array_equal(found[name].numpy(), reference(name, factors, total))
    average_checkpoints(sources, tmp_path / "single.pth", dtype="float32", **options)
    single = torch.load(tmp_path / "single.pth", weights_only=True)["state_dict"]
    expected = reference("layer.weight", factors, total).astype(np.float32)
    assert np.array_equal(single["layer.weight"].numpy(), expected)


def test_bfloat16_is_rounded_once_where_twice_would_be_wrong(tmp_path: Path) -> None:
    # 1 + 2**-8 is half way between two numbers of bfloat16; the sums lie a little beside it, by less than float32 sees.
    middle = torch.full((3, 8), 1 + 2**-8, dtype=torch.float64)
    middle[1], middle[2] = middle[1] + 2**-40, middle[2] - 2**-40
    save_file({"w": middle}, tmp_path / "a.safetensors")
    save_file({"w": middle.clone()}, tmp_path / "b.safetensors")
    average_checkpoints(
        [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "out.safetensors", dtype="bf16"
    )
    found = load_file(tmp_path / "out.safetensors")["w"]
    assert torch.equal(found, rounded(middle.numpy(), torch.bfloat16))
    assert found[:, 0].tolist() == [1.0, 1.0078125, 1.0]


def test_dtype_form_and_other_content_are_those_of_the_last(sources: list[Path], tmp_path: Path) -> None:
    report = average_checkpoints([*sources[1:], sources[0]], tmp_path / "out.pth", verify_output=True)
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["meta"] == {"epoch": 0}
    assert found["state_dict"]["layer.weight"].dtype == torch.float32
    expected = torch.from_numpy(reference("layer.weight", (1.0, 1.0, 1.0), 3.0)).float()
    torch.testing.assert_close(found["state_dict"]["layer.weight"], expected, rtol=1e-6, atol=1e-7)
    assert found["state_dict"]["norm.num_batches_tracked"] == 0
    assert report.notes == ("Not averaged, taken from epoch_0.pth: 'norm.num_batches_tracked'",)
    assert report.dropped == ("optimizer",)
    assert report.verified


def test_shards_are_boxes_of_the_average(sources: list[Path], tmp_path: Path) -> None:
    average_checkpoints(sources, tmp_path / "whole.safetensors")
    for to in ("dcp", "local"):
        average_checkpoints(sources, tmp_path / to, to=to, ranks=4)
        convert(tmp_path / to, tmp_path / f"{to}.safetensors")
        found, whole = load_file(tmp_path / f"{to}.safetensors"), load_file(tmp_path / "whole.safetensors")
        assert {*found} == {*whole}
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_tied_weights_stay_one_storage(tmp_path: Path) -> None:
    for index in range(2):
        weight = torch.full((64, 64), float(index))
        torch.save({"embed": weight, "head": weight, "other": weight + 1}, tmp_path / f"{index}.pth")
    report = average_checkpoints([tmp_path / "0.pth", tmp_path / "1.pth"], tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert found["embed"].data_ptr() == found["head"].data_ptr() != found["other"].data_ptr()
    assert report.bytes == 2 * 64 * 64 * 4
    assert found["head"].unique().tolist() == [0.5]


def test_overflow_is_counted(tmp_path: Path) -> None:
    for index in range(2):
        save_file({"w": torch.tensor([7e4, -7e4, 1.0])}, tmp_path / f"{index}.safetensors")
    report = average_checkpoints(
        [tmp_path / "0.safetensors", tmp_path / "1.safetensors"],
        tmp_path / "out.safetensors",
        weights=[3, -1.5],
        dtype={"w": "float8_e5m2"},
    )
    assert report.overflowed == {"w": 2}


def test_damage_is_found_on_the_way(sources: list[Path], tmp_path: Path) -> None:
    chunk = open_layout(sources[0]).tensors["state_dict/layer.weight"].chunks()[0]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset + 99)
        file.write(b"\x55")
    with pytest.raises(CorruptCheckpointError, match=r"'layer.weight' in epoch_0.pth is damaged"):
        average_checkpoints(sources, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_each_byte_is_read_once_and_its_checksum_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{name}.pth" for name in "ab"]
    for path in paths:
        torch.save({"wide": torch.randn(700, 900), "transposed": torch.randn(300, 200).t()}, path)
    counts = []
    preadv = os.preadv

    def counting(*args: Any) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    convert(paths[0], tmp_path / "cast.safetensors", dtype="bf16", drop=["transposed"])
    assert 0 < sum(counts) < 1.01 * 700 * 900 * 4
    counts.clear()
    average_checkpoints(paths, tmp_path / "mean.safetensors")
    # The transposed tensor is mapped and not read in order, so that its record is read for the checksum alone.
    assert 0 < sum(counts) < 1.01 * sum(path.stat().st_size for path in paths)
    chunk = open_layout(paths[1]).tensors["transposed"].chunks()[0]
    with paths[1].open("r+b") as file:
        file.seek(chunk.offset + 99)
        file.write(b"\x55")
    with pytest.raises(CorruptCheckpointError, match=r"'transposed' in b.pth is damaged"):
        average_checkpoints(paths, tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "'weights' needs one number per checkpoint: expected 3, got 2."),
        ({"weights": [1, 1, -2]}, "'weights' must be finite and not add up to zero, got [1.0, 1.0, -2.0]."),
        ({"weights": [1, 1, math.nan]}, "'weights' must be finite and not add up to zero, got [1.0, 1.0, nan]."),
        ({"weights": [1, 1, 1], "ema": 0.5}, "'weights' and 'ema' are two ways to say the same. Give one of them."),
        ({"weights": ["1", 1, 1]}, "'weights' must be numbers, got ['1', 1, 1]."),
        ({"weights": "123"}, "'weights' must be numbers, got '123'."),
        ({"ema": "0.9"}, "'ema' must lie between 0 and 1, got '0.9'."),
        ({"ema": 1.0}, "'ema' must lie between 0 and 1, got 1.0. 0.9 keeps nine tenths of the average."),
        ({"keep": "all"}, "Averaging works on the weights; leave out 'keep' 'all'."),
        ({"use_ema": True}, "Averaging works on 'state_dict'; convert each checkpoint with 'use_ema' first."),
    ],
)
def test_settings_that_mean_nothing(sources: list[Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        average_checkpoints(sources, sources[0].with_name("out.pth"), **options)


def test_one_source_that_is_no_list(sources: list[Path]) -> None:
    for given in (str(sources[0]), sources[0], open_layout(sources[0])):
        with pytest.raises(ConfigError, match=rf"'sources' is one checkpoint, '{sources[0]}'\. Give a list of two or"):
            average_checkpoints(given, sources[0].with_name("out.pth"))


def test_a_pattern_that_matches_nothing(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell gives it as it is: then it is the only source, and what is wrong is its name."""
    monkeypatch.chdir(sources[0].parent)
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint at 'epochs_\*\.pth'"):
        average_checkpoints(["epochs_*.pth"], "out.pth")


class TestCheckpointsThatDoNotMatch:
    def refused(self, folder: Path, one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], message: str) -> None:
        save_file(one, folder / "one.safetensors")
        save_file(two, folder / "two.safetensors")
        with pytest.raises(ConfigError, match=message):
            average_checkpoints([folder / "one.safetensors", folder / "two.safetensors"], folder / "out.safetensors")
        assert sorted(path.name for path in folder.iterdir()) == ["one.safetensors", "two.safetensors"]

    def test_names(self, tmp_path: Path) -> None:
        one, two = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "c": torch.ones(2)}
        self.refused(tmp_path, one, two, r"only '.*two.safetensors' has 'c'; only '.*one.safetensors' has 'b'\.")

    def test_prefix(self, tmp_path: Path) -> None:
        one, two = {"a.b": torch.ones(2)}, {"module.a.b": torch.ones(2)}
        self.refused(tmp_path, one, two, r"Without 'module.' in '.*two.safetensors' they would match: convert it with")

    def test_shapes(self, tmp_path: Path) -> None:
        self.refused(tmp_path, {"a": torch.ones(2)}, {"a": torch.ones(2, 1)}, r"'a' has shape \[2, 1\] and \[2\]")

    def test_packed_integers(self, tmp_path: Path) -> None:
        one, two = {"q": torch.ones(2, 2, dtype=torch.int32)}, {"q": torch.zeros(2, 2, dtype=torch.int32)}
        self.refused(tmp_path, one, two, r"'q' is int32 of shape \[2, 2\] and differs between .* packed or quantised")

    def test_kinds(self, tmp_path: Path) -> None:
        self.refused(
            tmp_path, {"a": torch.ones(2)}, {"a": torch.ones(2).long()}, "'a' is float32 and int64, which cannot"
        )

    def test_scaled_floats(self, tmp_path: Path) -> None:
        scaled = {"w": torch.ones(2).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1)}
        self.refused(tmp_path, scaled, scaled, r"'w' is float8_e4m3fn in units of 'w_scale_inv'")

    def test_one_checkpoint(self, sources: list[Path]) -> None:
        with pytest.raises(ConfigError, match="An average needs at least two checkpoints, got 1"):
            average_checkpoints([sources[0]], sources[0].with_name("out.pth"))
