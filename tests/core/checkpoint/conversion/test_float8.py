"""Casts to 8-bit floats are torch's, bit for bit; what is too large is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.checkpoint import convert
from mmfsdp.checkpoint.files.elements import values
from mmfsdp.checkpoint.files.rounding import Rounding

pytest.importorskip("numpy")

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def cast(given: torch.Tensor, target: str) -> tuple[torch.Tensor, int]:
    source = str(given.dtype).removeprefix("torch.")
    numbers = values(memoryview(given.contiguous().view(torch.uint8).numpy()), source)
    data, count = Rounding(target, len(numbers))(numbers)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), count


def numbers_and_middles(target: str) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8).view(to_torch(target)).float()
    numbers = codes[codes.isfinite()].sort().values
    return torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])


def edges(target: str) -> torch.Tensor:
    """All numbers of a dtype, the middles between them, and the float32 around each."""
    special = torch.tensor([464.0, -480.0, 61440.0, 65536.0, 3e38, torch.inf, -torch.inf, torch.nan])
    words = torch.cat([numbers_and_middles(target), special]).view(torch.int32)
    return torch.cat([words + step for step in range(-2, 3)]).view(torch.float32)


@pytest.mark.parametrize("target", FLOAT8)
def test_bits_are_those_of_torch(target: str) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    random = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32).view(torch.float32)
    scaled = torch.randn(300_000, generator=generator) * 100
    for given in (words.view(torch.bfloat16), words.view(torch.float16), random, scaled, edges(target)):
        found, count = cast(given, target)
        wide, became = given.float(), found.view(to_torch(target)).float()
        if target == "float8_e4m3fn":  # beyond the middle between 448 and what would come next; older torch has NaN
            lost = wide.abs() > 464
            assert set(became[lost].abs().tolist()) <= {448.0}
        else:
            lost = wide.isfinite() & became.isinf()
        assert count == int(lost.sum())
        kept = ~lost if target == "float8_e4m3fn" else slice(None)
        assert torch.equal(found[kept], given.to(to_torch(target)).view(torch.uint8)[kept])


@pytest.mark.parametrize("target", FLOAT8)
def test_float64_is_rounded_once(target: str) -> None:
    exact = numbers_and_middles(target).double()
    # Rounded to float32 first, these would be ties, and that is what torch makes of them.
    for side in (-1, 1):
        given = exact * (1 + side * 2.0**-40)
        farther = (exact * (1 + side * 2.0**-20)).float()  # on the same side of the middle
        assert torch.equal(cast(given, target)[0], cast(farther, target)[0])


def test_converted(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([[1.1, -0.07], [500.0, float("-inf")]]), "n": torch.arange(3)}
    torch.save({"state_dict": weights, "meta": {}}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out.safetensors", dtype="fp8", verify_output=True)
    assert report.casts == {"a": "float8_e4m3fn"}
    assert report.overflowed == {"a": 2}
    found = load_file(tmp_path / "out.safetensors")
    assert found["a"].float().tolist() == [[1.125, -0.0703125], [448.0, -448.0]]
    assert torch.equal(found["n"], weights["n"])
    convert(tmp_path / "out.safetensors", tmp_path / "wide.pth", dtype={"a": "fp32"}, verify_output=True)
    wide = torch.load(tmp_path / "wide.pth", weights_only=True)["state_dict"]
    assert torch.equal(wide["a"], found["a"].float())
    convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="float8_e5m2", verify_output=True)
    half = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]["a"]
    assert torch.equal(half.view(torch.uint8), weights["a"].to(torch.float8_e5m2).view(torch.uint8))
