"""Parts of a checkpoint under other names and dtypes: written as asked for, or an error says why not."""

from __future__ import annotations

import collections
import hashlib
import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.basics.text import parse_bytes
from mmfsdp.checkpoint import TargetExistsError, convert, diff, open_layout, verify
from mmfsdp.checkpoint.files.elements import values
from mmfsdp.checkpoint.files.rounding import Rounding
from mmfsdp.errors import CheckpointError, ConfigError, CorruptCheckpointError, FormatError

STATE = {
    "module.backbone.conv.weight": torch.arange(6.0).view(2, 3),
    "module.backbone.bn.num": torch.tensor(3),
    "module.head.weight": torch.ones(4, dtype=torch.float64),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    weights = collections.OrderedDict(STATE)
    weights._metadata = {"": {"version": 1}, "module.backbone.bn": {"version": 2}}  # type: ignore[attr-defined]
    tree = {
        "state_dict": weights,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]},
        "meta": {"epoch": 3},
    }
    torch.save(tree, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def names(path: Path) -> list[str]:
    return list(open_layout(path).tensors)


def test_choosing_and_renaming(source: Path) -> None:
    target = source.with_name("out.pth")
    report = convert(
        source,
        target,
        include=["module.**"],
        exclude=["re:.*num"],
        strip_prefix="module.",
        rename=[(r"^backbone\.(.*)", r"encoder.\1"), ("conv", "stem")],
    )
    loaded = torch.load(target, weights_only=True)["state_dict"]
    assert list(loaded) == ["encoder.stem.weight", "head.weight"]
    assert torch.equal(loaded["encoder.stem.weight"], STATE["module.backbone.conv.weight"])
    assert loaded._metadata == {"": {"version": 1}, "encoder.bn": {"version": 2}}
    assert report.dropped == ("optimizer", "module.backbone.bn.num")


def test_choosing_among_everything(source: Path) -> None:
    target = source.with_name("out.pth")
    convert(source, target, keep="all", exclude=["optimizer"], strip_prefix="module.")
    loaded = torch.load(target, weights_only=True)
    assert list(loaded) == ["state_dict", "meta"]
    assert "backbone.conv.weight" in loaded["state_dict"]
    convert(source, target, keep="all", exclude=["optimizer/**"], overwrite=True)
    assert list(torch.load(target, weights_only=True)) == ["state_dict", "meta"]
    convert(source, target.with_suffix(".safetensors"), keep="all", include=["optimizer/**"])
    assert list(load_file(target.with_suffix(".safetensors"))) == ["optimizer/state/0/exp_avg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["modul.**"]}, r"include='modul\.\*\*' matches nothing\. Did you mean"),
        ({"exclude": ["backbone.*"]}, r"exclude='backbone\.\*' matches nothing"),
        ({"include": ["*.head.*", "**.scale"]}, r"'\*\*\.scale' matches nothing"),
        (
            {"include": ["**.conv.weight", "*.weight"]},
            r"matches nothing\. '\*' stays within one dotted part: '\*\*\.weight' matches 2 names, such as 'module",
        ),
        ({"strip_prefix": "model."}, r"strip_prefix='model\.' matches nothing"),
        ({"rename": [("neck", "fpn")]}, r"rename='neck' matches nothing"),
        ({"rename": [("(", "")]}, r"'\(' is not a regular expression"),
        ({"rename": [("head", r"\2")]}, r"rename='head' -> '\\\\2' is malformed"),
        ({"include": ["re:["]}, r"'re:\[' is not a regular expression"),
        (
            {"rename": [(r".*\.weight", "w")]},
            r"conv\.weight' and 'module\.head\.weight' would both be named 'w'",
        ),
        ({"exclude": ["**"]}, r"No tensor is left to write"),
        ({"dtype": "bf17"}, r"'bf17' is not a dtype"),
        ({"dtype": "int8"}, r"Tensors cannot be cast to 'int8' here\. Use one of float8_e4m3fn, float8_e5m2, float16"),
        ({"dtype": {"**.num": "half"}}, r"dtype pattern '\*\*\.num' matches no floating point tensor"),
        ({"keep": "all", "use_ema": True}, r"'use_ema' writes the weights; it cannot be combined with 'keep' 'all'"),
        ({"keep": "all", "publish": True}, r"'publish' writes the weights; it cannot be combined with 'keep' 'all'"),
        ({"max_shard_size": "5GB"}, r"'out\.pth' has the suffix of a file\. Leave out the suffix"),
        ({"max_shard_size": "5 apples"}, r"Conversion\.max_shard_size: '5 apples' is not a size"),
        ({"max_shard_size": "30"}, r"'30' has no unit, and sizes need one\. Write '30MiB' or '30GiB'"),
        ({"keep_only": "model"}, r"Conversion\.keep_only: unknown setting 'keep_only'\. Did you mean 'keep'\?"),
        ({"jobs": 0}, r"Conversion\.jobs: Input should be greater than or equal to 1, got 0"),
        ({"drop": ["optimizer"], "keep": "model"}, r"'drop' leaves keys out of everything; it cannot be combined"),
        ({"drop": "optimizer", "publish": True}, r"'publish' writes the weights; it cannot be combined with 'drop'"),
        (
            {"to": "pth", "max_shard_size": 5},
            r"'max_shard_size' applies only to the format 'safetensors_index' or 'huggingface', not to 'pth'",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(source: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(source, source.with_name("out.pth"), **arguments)
    assert [path.name for path in source.parent.iterdir()] == ["in.pth"]


def test_casting(source: Path) -> None:
    pytest.importorskip("numpy")
    report = convert(source, source.with_name("out.safetensors"), dtype="bf16", verify_output=True)
    loaded = load_file(source.with_name("out.safetensors"))
    assert [loaded[name].dtype for name in STATE] == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert all(torch.equal(loaded[name], STATE[name].to(loaded[name].dtype)) for name in STATE)
    assert (report.casts["module.head.weight"], len(report.casts), report.bytes) == ("bfloat16", 2, 12 + 8 + 8)
    patterns = {"**.head.*": "half", "**.weight": "float64"}
    convert(source, source.with_name("out.pth"), dtype=patterns, verify_output=True)
    loaded = torch.load(source.with_name("out.pth"), weights_only=True)["state_dict"]
    assert [loaded[name].dtype for name in STATE] == [torch.float64, torch.int64, torch.float16]
    assert verify(source.with_name("out.pth")).ok


def test_overflow_is_counted_and_tied_tensors_stay_tied(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    weight = torch.tensor([1e5, -1e6, 1.0, float("inf"), float("nan")])
    torch.save({"state_dict": {"a": weight, "tied": weight, "view": weight[1:3]}}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="fp16", verify_output=True)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["view"].tolist() == [-float("inf"), 1.0]
    assert report.overflowed["a"] == 2
    assert report.overflowed["view"] == 1


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_casts_are_those_of_torch(source: str, target: str) -> None:
    pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (80_000,), dtype=torch.uint8, generator=generator)
    given = raw.view(to_torch(source))
    if source == "float64":  # of a size that the others have too, so that not all is zero or infinite
        given = torch.randn(40_000, dtype=torch.float64, generator=generator) * torch.logspace(-44, 39, 40_000).double()
    numbers = values(memoryview(given.view(torch.uint8).numpy().tobytes()), source)
    data, _ = Rounding(target, len(numbers))(numbers)
    found = torch.frombuffer(bytearray(data), dtype=to_torch(target)).double()
    expected = given.to(to_torch(target)).double()
    assert torch.equal(found.isnan(), expected.isnan())
    if (source, target) != ("float64", "bfloat16"):  # torch rounds that twice
        assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_every_float16_and_every_middle_is_rounded_to_as_by_torch() -> None:
    pytest.importorskip("numpy")
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = words[words.isfinite()].float().sort().values
    edges = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2]).view(torch.int32)
    # Words of float32 beside them; next to zero this steps to the NaNs.
    given = torch.cat([edges + step for step in (-1, 0, 1)]).view(torch.float32)
    given = given[given.abs() < 65520]
    data, lost = Rounding("float16", len(given))(given.numpy())
    assert lost == 0
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.int16), given.half().view(torch.int16))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**16 - 2), st.integers(-3, 3), st.sampled_from([2**-60, 2**-30, 2**-9]))
def test_float64_to_bfloat16_rounds_once(code: int, steps: int, step: float) -> None:
    numpy = pytest.importorskip("numpy")
    with numpy.errstate(all="ignore"):
        low, high = ((numpy.array([code, code + 1], numpy.uint32) << 16).view(numpy.float32)).astype(float)
    if not (numpy.isfinite([low, high]).all() and low * high >= 0):
        return
    middle = (low + high) / 2
    value = middle + steps * step * (high - low)
    found, _ = Rounding("bfloat16", 1)(numpy.array([value]))
    exact, gaps = Fraction(float(value)), []
    for end in (low, high):
        gaps.append(abs(Fraction(float(end)) - exact))
    nearest = code + (gaps[1] < gaps[0]) if gaps[0] != gaps[1] else code + code % 2
    assert int.from_bytes(found, "little") == nearest


def test_averaged_weights(tmp_path: Path) -> None:
    plain, mean = torch.zeros(2), torch.ones(2)
    averaged = {"module.w": mean, "steps": torch.tensor(5)}
    torch.save({"state_dict": {"w": plain, "b": plain}, "ema_state_dict": averaged}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out.safetensors", use_ema=True)
    loaded = load_file(tmp_path / "out.safetensors")
    assert (loaded["w"].tolist(), loaded["b"].tolist(), report.notes) == ([1, 1], [0, 0], ())
    torch.save({"state_dict": {"b": plain}, "ema_state_dict": averaged}, tmp_path / "odd.pth")
    with pytest.raises(FormatError, match=r"'ema_state_dict' of odd\.pth holds 'w', which 'state_dict' lacks"):
        convert(tmp_path / "odd.pth", tmp_path / "x.pth", use_ema=True)
    torch.save({"state_dict": {"b": plain}}, tmp_path / "none.pth")
    with pytest.raises(FormatError, match="no averaged weights"):
        convert(tmp_path / "none.pth", tmp_path / "x.pth", use_ema=True)


def test_averaged_weights_of_mmengine(tmp_path: Path) -> None:
    mmengine = pytest.importorskip("mmengine")
    from mmengine.hooks import EMAHook

    # Its hook swaps the two before saving, so that `state_dict` is what one deploys.
    checkpoint = {"state_dict": {"w": torch.zeros(2)}, "meta": {"mmengine_version": mmengine.__version__}}
    hook = EMAHook()
    hook.ema_model = torch.nn.Module()
    hook.ema_model.register_buffer("steps", torch.tensor(1))
    hook.ema_model.module = torch.nn.Module()
    hook.ema_model.module.register_buffer("w", torch.ones(2))
    hook.before_save_checkpoint(None, checkpoint)
    torch.save(checkpoint, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out.safetensors", use_ema=True)
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [1, 1]
    assert "EMAHook saves the averaged weights under 'state_dict' already" in report.notes[0]
    arguments: Any = {"keep": "ema_state_dict", "include": ["module.*"], "strip_prefix": "module."}
    convert(tmp_path / "in.pth", tmp_path / "plain.safetensors", **arguments)
    assert load_file(tmp_path / "plain.safetensors")["w"].tolist() == [0, 0]


def test_averaged_weights_of_lightning(tmp_path: Path) -> None:
    # Its WeightAveraging callback swaps the two before saving, too, under names of its own.
    model = torch.nn.Linear(2, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.nn.init.zeros_(model.weight)
    state = average.state_dict()
    checkpoint = {
        "state_dict": {name[7:]: value for name, value in state.items() if name.startswith("module.")},
        "current_model_state": model.state_dict(),
        "averaging_state": {"n_averaged": state["n_averaged"]},
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(checkpoint, tmp_path / "in.ckpt")
    report = convert(tmp_path / "in.ckpt", tmp_path / "out.safetensors", use_ema=True)
    assert load_file(tmp_path / "out.safetensors")["weight"].equal(state["module.weight"])
    assert "WeightAveraging saves the averaged weights under 'state_dict' already" in report.notes[0]
    convert(tmp_path / "in.ckpt", tmp_path / "plain.safetensors", keep="current_model_state")
    assert load_file(tmp_path / "plain.safetensors")["weight"].tolist() == [[0, 0]]


def test_publishing(source: Path) -> None:
    report = convert(source, source.with_name("model.pth"), publish=True)
    path = Path(report.path)
    assert path.name == f"model-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
    assert list(torch.load(path, weights_only=True)) == ["state_dict", "meta"]
    assert sorted(item.name for item in source.parent.iterdir()) == ["in.pth", path.name]
    with pytest.raises(TargetExistsError):
        convert(source, source.with_name("model.pth"), publish=True)


def test_shards(source: Path) -> None:
    target = source.with_name("shards")
    report = convert(source, target, max_shard_size=30, verify_output=True)
    assert (report.format, report.verified) == ("safetensors_index", True)
    assert report.files == {
        "model-00001-of-00003.safetensors": 24,
        "model-00002-of-00003.safetensors": 8,
        "model-00003-of-00003.safetensors": 32,
    }
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 64}
    loaded = {name: load_file(target / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    found = verify(target)
    assert (found.ok, found.manifest, found.unchecked) == (True, True, ())
    assert diff(source, target).same
    data = bytearray((target / "model-00003-of-00003.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "model-00003-of-00003.safetensors").write_bytes(data)
    assert "The data of tensor 'module.head.weight' in" in verify(target).problems[0].message
    assert [item.name for item in diff(source, target).values] == ["module.head.weight"]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2 << 30), (7, 7), ("3B", 3)])
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0B", "-5", "5XB", "", "GB", 0, True, 1.5])
def test_what_is_not_a_size(text: int | str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_dry_run_writes_nothing(source: Path) -> None:
    report = convert(source, source.with_name("out.pth"), dry_run=True)
    assert (report.tensors, report.bytes, report.bytes_read, report.files) == (3, 64, 64, {"": 64})
    assert report.free_bytes > 64
    assert report.dropped == ("optimizer",)
    assert (report.dry_run, report.verified) == (True, False)
    shards = convert(source, source.with_name("shards"), max_shard_size=40, dry_run=True, verify_output=True)
    assert list(shards.files.values()) == [32, 32]
    assert [path.name for path in source.parent.iterdir()] == ["in.pth"]
    shutil.copy(source, source.with_name("out.pth"))
    with pytest.raises(TargetExistsError):
        convert(source, source.with_name("out.pth"), dry_run=True)


def test_a_full_disk_is_noticed_before_anything_is_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)._replace(free=63)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"no room for out\.pth: it needs 64 bytes, and 63 are free"):
        convert(source, source.with_name("out.pth"))
    assert [path.name for path in source.parent.iterdir()] == ["in.pth"]


def test_output_that_differs_never_appears(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfsdp.checkpoint.conversion import targets

    def spoiled(path: Path, *arguments: Any, **options: Any) -> Any:
        entries = write(path, *arguments, **options)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return entries

    write = targets.write_files
    monkeypatch.setattr(targets, "write_files", spoiled)
    with pytest.raises(CorruptCheckpointError, match=r"What was written is damaged: The data of tensor '.*' in"):
        convert(source, source.with_name("out.safetensors"), verify_output=True)
    assert [path.name for path in source.parent.iterdir()] == ["in.pth"]


def test_directories_with_other_things_are_not_replaced(source: Path) -> None:
    target = source.with_name("shards")
    convert(source, target, max_shard_size=30)
    convert(source, target, max_shard_size=99, overwrite=True)
    assert len(list(target.iterdir())) == 3
    (target / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"is not replaced: it also holds 'notes\.txt'"):
        convert(source, target, max_shard_size=30, overwrite=True)
    with pytest.raises(ConfigError, match="is part of the source"):
        convert(source, source.parent, max_shard_size=30, overwrite=True)
    with pytest.raises(ConfigError, match="is part of the source"):
        convert(target, target, max_shard_size=30, overwrite=True)
    assert (target / "notes.txt").read_text() == "precious"
    assert source.exists()
