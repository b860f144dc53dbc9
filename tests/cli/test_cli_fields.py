"""The fields of ``--json`` are those of docs/reference/cli.md, and mean the same in every command."""

from __future__ import annotations

from pathlib import Path

from tests.cli.support import damaged, fields_of, golden, invoke
from tools.cli_reference import FIELDS, JSON


def test_fields(tmp_path: Path) -> None:
    path = golden("epoch_3.pth", tmp_path)
    fields_of("inspect", invoke("inspect", path, "--json").stdout)
    fields_of("inspect --tree", invoke("inspect", path, "--tree", "--json").stdout)
    fields_of("inspect --tensor", invoke("inspect", path, "--tensor", "head", "--json").stdout)
    fields_of("convert", invoke("convert", path, tmp_path / "out.pth", "--dry-run", "--json").stdout)
    written = fields_of("convert", invoke("convert", path, tmp_path / "out.pth", "--json").stdout)
    inspected = fields_of("inspect", invoke("inspect", written["path"], "--json").stdout)
    assert [inspected[field] for field in ("format", "num_tensors", "bytes")] == ["torch_zip", 2, written["bytes"]]
    fields_of("verify", invoke("verify", path, "--json").stdout)
    found = fields_of("verify", invoke("verify", damaged(path), "--json").stdout)
    assert [problem["file"] for problem in found["problems"]] == [str(damaged(path))]
    fields_of("diff", invoke("diff", path, damaged(path), "--json").stdout)
    differing = fields_of("diff", invoke("diff", path, tmp_path / "out.pth", "--json").stdout)
    assert (differing["num_differing"], differing["num_tensors"], differing["same"]) == (1, 3, False)
    fields_of("formats", invoke("formats", "--json").stdout)
    fields_of("recipes", invoke("recipes", "--json").stdout)
    fields_of("recipes", f"[{invoke('recipes', 'megatron-llama-to-hf', '--json').stdout}]")


def test_every_field_is_printed_by_a_command() -> None:
    assert {field.rstrip("?") for fields in JSON.values() for field in fields.split()} | {"error"} == {*FIELDS}
