"""A delta and its base give the second checkpoint, bit for bit; another base is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.basics.dtypes import DTYPES, to_torch
from mmfsdp.checkpoint import apply_delta, checkpoint_delta, convert, diff, open_layout
from mmfsdp.errors import ConfigError, CorruptCheckpointError, FormatError

pytest.importorskip("numpy")

TABLE = "mmfsdp.delta"


def random_bits(dtype: str, seed: int, *shape: int) -> torch.Tensor:
    """Every bit pattern may occur: NaNs with payloads, infinities, denormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = DTYPES[dtype][0]
    data = torch.randint(0, 2 if dtype == "bool" else 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return data.to(torch.uint8).view(to_torch(dtype))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two ``.pth`` files with all dtypes, where tensors are equal, new, gone, and of another dtype or shape."""
    dtypes = [dtype for dtype in DTYPES if hasattr(torch, dtype)]
    one = {f"{dtype}.weight": random_bits(dtype, 1, 5, 6) for dtype in dtypes}
    two = {f"{dtype}.weight": random_bits(dtype, 2, 5, 6) for dtype in dtypes}
    one["same"] = two["same"] = random_bits("float32", 3, 40, 50)
    one["gone"], two["new"] = torch.ones(3), torch.zeros(2, 0)
    one["cast"], two["cast"] = torch.ones(4), torch.ones(4).half()
    one["grown"], two["grown"] = torch.ones(4), torch.ones(5)
    one["count"], two["count"] = torch.tensor(1), torch.tensor(-1)
    one["bfloat16.strided"], two["bfloat16.strided"] = (random_bits("bfloat16", seed, 6, 8).T for seed in (4, 5))
    for name, state in (("one", one), ("two", two)):
        torch.save({"state_dict": state, "meta": {"name": name}}, tmp_path / f"{name}.pth")
    return tmp_path / "one.pth", tmp_path / "two.pth"


@pytest.mark.parametrize("to", ["delta.safetensors", "delta.pth", "dcp", "local", "safetensors_index"])
def test_the_round_trip_is_exact(pair: tuple[Path, Path], to: str, tmp_path: Path) -> None:
    one, two = pair
    if "safetensors" in to:  # which have no complex128
        one, two = (path.with_name(f"real_{path.name}") for path in pair)
        for path, real in zip(pair, (one, two), strict=True):
            convert(path, real, exclude=["complex128.*"])
    options = {} if "." in to else {"to": to, **({} if "_" in to else {"ranks": 3})}
    report = checkpoint_delta(one, two, tmp_path / to, **options)
    assert "1 are equal and left out" in report.notes[0]
    assert report.notes[-1] == "The first checkpoint alone has 'gone'"
    assert "same" not in [name.rpartition("/")[2] for name in open_layout(tmp_path / to).tensors]
    apply_delta(one, tmp_path / to, tmp_path / "again.pth", verify_output=True)
    assert diff(tmp_path / "again.pth", two, keep="model").same
    assert [*torch.load(tmp_path / "again.pth")["state_dict"]] == [*torch.load(two)["state_dict"]]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("write", [checkpoint_delta, apply_delta])
def test_a_source_that_changes_meanwhile(write: Any, which: int, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """It is read twice, and what the first reading decided may fit no longer."""
    checkpoint_delta(*pair, tmp_path / "delta.pth")
    sources = pair if write is checkpoint_delta else (pair[0], tmp_path / "delta.pth")

    def touch(done: int, total: int) -> None:
        if done < total:
            os.utime(sources[which], ns=(1, done))

    with pytest.raises(CorruptCheckpointError, match=rf"{sources[which].name} changed while it was read"):
        write(*sources, tmp_path / "out.pth", progress=touch)
    assert not (tmp_path / "out.pth").exists()


def test_bases_and_results_may_be_sharded_and_cast(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        save_file({"w": random_bits("float32", seed, 300, 70), "b": random_bits("float16", seed, 9)}, tmp_path / name)
    convert(tmp_path / "one", tmp_path / "base", to="dcp", ranks=4)
    checkpoint_delta(tmp_path / "base", tmp_path / "two", tmp_path / "delta.safetensors")
    apply_delta(tmp_path / "base", tmp_path / "delta.safetensors", tmp_path / "out", to="dcp", ranks=3)
    assert diff(tmp_path / "out", tmp_path / "two").same
    apply_delta(tmp_path / "one", tmp_path / "delta.safetensors", tmp_path / "bf16.safetensors", dtype="bfloat16")
    convert(tmp_path / "two", tmp_path / "cast.safetensors", dtype="bfloat16")
    assert diff(tmp_path / "bf16.safetensors", tmp_path / "cast.safetensors").same


def test_what_did_not_change_takes_no_room(tmp_path: Path) -> None:
    state = {f"layer.{index}": torch.randn(64, 64) for index in range(8)}
    save_file(state, tmp_path / "one.safetensors")
    save_file(state | {"layer.3": state["layer.3"] + 1}, tmp_path / "two.safetensors")
    report = checkpoint_delta(
        tmp_path / "one.safetensors", tmp_path / "two.safetensors", tmp_path / "delta.safetensors"
    )
    assert report.notes == ("1 tensors differ, 7 are equal and left out",)
    found = load_file(tmp_path / "delta.safetensors")
    assert {*found} == {"layer.3", TABLE}
    assert found["layer.3"].dtype == torch.uint32
    table = json.loads(bytes(found[TABLE].tolist()))
    assert table["version"] == 1
    assert table["tensors"]["layer.0"]["kind"] == "equal"


class TestErrors:
    @pytest.fixture
    def delta(self, tmp_path: Path) -> Path:
        save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "one.safetensors")
        save_file({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "two.safetensors")
        checkpoint_delta(tmp_path / "one.safetensors", tmp_path / "two.safetensors", tmp_path / "delta.safetensors")
        return tmp_path / "delta.safetensors"

    @pytest.mark.parametrize(
        "other",
        [
            {"a": torch.ones(3), "b": torch.full((2,), 2.0)},
            {"a": torch.zeros(3), "b": torch.ones(2)},  # `a` is not even in the delta
            {"a": torch.ones(3)},
            {"a": torch.ones(3), "b": torch.ones(2, 1)},
            {"a": torch.ones(3), "b": torch.ones(2).int()},
        ],
    )
    def test_another_base(self, delta: Path, other: dict[str, torch.Tensor]) -> None:
        save_file(other, delta.with_name("other.safetensors"))
        name = "a" if "b" in other and other["a"][0] == 0 else "b"
        with pytest.raises(ConfigError, match=rf"was not made from '.*other.safetensors': '{name}' is not the tensor"):
            apply_delta(delta.with_name("other.safetensors"), delta, delta.with_name("out.pth"))
        assert not delta.with_name("out.pth").exists()

    def test_no_delta(self, delta: Path) -> None:
        one = delta.with_name("one.safetensors")
        with pytest.raises(FormatError, match=r"one.safetensors is not a delta: it has no 'mmfsdp.delta'"):
            apply_delta(one, one, delta.with_name("out.pth"))
        with pytest.raises(ConfigError, match=r"delta.safetensors' is a delta itself. Apply it first"):
            checkpoint_delta(one, delta, delta.with_name("out.pth"))

    def test_settings_that_would_lose_something(self, delta: Path) -> None:
        one, two = delta.with_name("one.safetensors"), delta.with_name("two.safetensors")
        with pytest.raises(ConfigError, match="all names and dtypes as they are: leave out 'dtype' 'bfloat16'"):
            checkpoint_delta(one, two, delta.with_name("out.pth"), dtype="bf16")

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("{", CorruptCheckpointError, "mmfsdp.delta of broken.safetensors is damaged"),
            ('{"version": 2, "tensors": {}}', FormatError, r"a delta of version 2 \(expected 1\)"),
            (
                '{"version": 1, "tensors": {"a": {"kind": "x", "dtype": "float32"}}}',
                CorruptCheckpointError,
                "the kind of",
            ),
            (
                '{"version": 1, "tensors": {"c": {"kind": "whole", "dtype": "float32"}}}',
                CorruptCheckpointError,
                "broken.safetensors lacks 'c', which it lists",
            ),
        ],
    )
    def test_damaged_tables(self, delta: Path, text: str, error: type[Exception], message: str) -> None:
        broken = delta.with_name("broken.safetensors")
        save_file({TABLE: torch.tensor([*text.encode()], dtype=torch.uint8)}, broken)
        with pytest.raises(error, match=message):
            apply_delta(delta.with_name("one.safetensors"), broken, delta.with_name("out.pth"))

    def test_a_damaged_delta(self, delta: Path) -> None:
        chunk = open_layout(delta).tensors["b"].chunks()[0]
        broken = Path(shutil.copy(delta, delta.with_name("broken.safetensors")))
        data = bytearray(broken.read_bytes())
        data[chunk.offset] ^= 1
        broken.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=r"'b' in broken.safetensors is damaged"):
            apply_delta(delta.with_name("one.safetensors"), broken, delta.with_name("out.pth"))
