"""`Conversion`: the settings of `convert` as a value that is validated, loaded from files and reported."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from mmfsdp.checkpoint import Conversion, convert, open_layout
from mmfsdp.errors import ConfigError

YAML = """
keep: model
dtype: {"**.weight": bf16}
rename: {"^net": model}
exclude: "**.num"
max_shard_size: 5GB
"""
TOML = """
keep = "model"
exclude = ["**.num"]
max_shard_size = 5000000000
dtype = {"**.weight" = "bfloat16"}
rename = [["^net", "model"]]
"""
EXPECTED = Conversion(
    keep="model",
    dtype={"**.weight": "bfloat16"},
    rename=(("^net", "model"),),
    exclude=("**.num",),
    max_shard_size=5 * 10**9,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.pth"
    torch.save({"state_dict": {"net.weight": torch.ones(4), "net.bias": torch.zeros(2)}, "optimizer": {}}, path)
    return path


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", EXPECTED.to_json())]
)
def test_files_of_settings(tmp_path: Path, name: str, text: str) -> None:
    if ".y" in name:
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    assert Conversion.from_file(tmp_path / name) == EXPECTED


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, message in (
        ('{"strip_prefixes": "x"}', r"Conversion\.strip_prefixes: unknown setting .* Did you mean 'strip_prefix'\?"),
        ('{"to": "safetensor"}', r"Conversion\.to: 'safetensor' is not a format to write\. Did you mean 'safetensors'"),
        ('{"ranks": "2x"}', r"Conversion\.ranks: '2x' is not a number of ranks"),
        ('{"max_shard_size": "30"}', r"Conversion\.max_shard_size: '30' has no unit"),
        ('{"dtype": {"**": "bf17"}}', r"Conversion\.dtype: 'bf17' is not a dtype"),
        ("[1]", r"a\.json holds a list, expected settings by name"),
        ("{", r"a\.json cannot be parsed"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Conversion.from_file(path)


def test_files_made_to_exhaust_are_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    aliases = "&a [x, x, x, x, x, x, x, x, x, x], "
    aliases += ", ".join(f"&{n} [{', '.join([f'*{m}'] * 10)}]" for m, n in itertools.pairwise("abcdefghi"))
    for name, text, message in (
        ("a.json", "[" * 100_000, r"a\.json cannot be parsed: it is nested too deeply"),
        ("a.toml", f"to = {'[' * 100_000}", r"a\.toml cannot be parsed: it is nested too deeply"),
        ("a.yaml", "[" * 10_000, r"a\.yaml cannot be parsed: it is nested too deeply"),
        ("a.yaml", f"include: [{aliases}]", r"a\.yaml cannot be parsed: it holds more than 1000000 values, with each"),
        ("a.yaml", "include: &a [*a]", r"a\.yaml cannot be parsed: it holds itself"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            Conversion.from_file(tmp_path / name)
    (tmp_path / "a.yaml").write_text("include: &a ['x.*']\nexclude: *a\n")
    assert Conversion.from_file(tmp_path / "a.yaml").exclude == ("x.*",)


def test_keywords_win_over_a_conversion(source: Path) -> None:
    target = source.with_name("out.safetensors")
    report = convert(source, target, Conversion(dtype="bf16", exclude=("*.bias",)), exclude=(), rename={"net": "model"})
    found = {name: entry.dtype for name, entry in open_layout(target).tensors.items()}
    assert found == {"model.weight": "bfloat16", "model.bias": "bfloat16"}
    assert report.renamed == {"net.weight": "model.weight", "net.bias": "model.bias"}


def test_the_report_says_what_was_decided(source: Path) -> None:
    report = convert(source, source.with_name("out"), to="dcp", dry_run=True)
    assert report.conversion == Conversion(to="dcp", keep="all", ranks=1)
    content = json.loads(json.dumps(report.describe()))
    assert {key: content["conversion"][key] for key in ("to", "keep", "ranks")} == {
        "to": "dcp",
        "keep": "all",
        "ranks": 1,
    }
    fields = {field.name for field in dataclasses.fields(report)}
    assert set(content) == fields - {"tensors"} | {"num_tensors"}
    again = convert(source, source.with_name("out"), report.conversion)
    assert (again.tensors, again.files) == (report.tensors, report.files)


def test_a_conversion_does_not_change() -> None:
    conversion = Conversion(keep="model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        conversion.keep = "all"  # type: ignore[misc]
    assert conversion.changed({"keep": "all"}).keep == "all"
    assert conversion.changed({}) is conversion
