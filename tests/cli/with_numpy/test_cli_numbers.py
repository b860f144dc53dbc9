"""What needs numpy: casting, statistics, tolerances, and how many elements differ."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.cli.support import damaged, fields_of, golden, read_safetensors, run, write_safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return golden("epoch_3.pth", tmp_path)


def test_casting(checkpoint: Path) -> None:
    target = checkpoint.with_name("out.safetensors")
    done = run("convert", checkpoint, target, "--dtype", "bf16", "--include", "backbone.*")
    assert "1 tensor, 12 B in " in done.stdout
    assert "Cast: 1 tensor." in done.stdout
    expected = b"".join(struct.pack("<f", number)[2:] for number in range(6))  # exact in bfloat16
    assert read_safetensors(target) == {"backbone.conv": ("BF16", [2, 3], expected)}
    words = ["convert", checkpoint, checkpoint.with_name("n.pth"), "--dtype", "head=fp32", "--dtype", "re:.*=fp16"]
    dry = run(*words, "--dry-run").stdout
    assert "New dtypes (2):" in dry
    assert "  head: float32" in dry
    assert "Cast: 2 tensors." in run(*words).stdout


def test_what_is_too_large_is_reported(tmp_path: Path) -> None:
    large = write_safetensors(tmp_path / "large.safetensors", {"a\x1b[2Jb": [1e30, 1e30]})
    done = run("convert", large, tmp_path / "out.pth", "--dtype", "float16")
    assert "warning: too large for the new dtype (1):\n  2 elements of a\\x1b[2Jb, to infinity" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_statistics(checkpoint: Path) -> None:
    done = run("inspect", checkpoint, "--tensor", "backbone.conv", "--stats")
    assert done.returncode == 0
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["max", "5"] in lines
    assert ["mean", "2.5"] in lines
    printed = run("inspect", checkpoint, "--tensor", "head", "--stats", "--json").stdout
    assert fields_of("inspect --tensor --stats", printed)["zeros"] == 4


def test_how_much_differs(checkpoint: Path) -> None:
    other = damaged(checkpoint)
    assert "state_dict/backbone.conv: 1 of 6 elements differ, by up to " in run("diff", checkpoint, other).stdout
    assert json.loads(run("diff", checkpoint, other, "--json").stdout)["values"][0]["differing"] == 1
    assert run("diff", checkpoint, other, "--atol", "10").returncode == 0


def test_a_tolerance_is_a_number(checkpoint: Path) -> None:
    done = run("diff", checkpoint, checkpoint, "--rtol", "nan")
    assert done.returncode == 2
    assert "error: --rtol and --atol must be numbers of at least 0, got nan and 0.0." in done.stderr


def test_a_page_shows_what_differs(checkpoint: Path) -> None:
    page = checkpoint.with_name("report.html")
    assert run("diff", checkpoint, damaged(checkpoint), "--html", page).returncode == 1
    assert "3 tensors compared" in page.read_text(encoding="utf-8")


def test_a_page_does_not_replace_a_directory(checkpoint: Path) -> None:
    (folder := checkpoint.with_name("work_dirs")).mkdir()
    done = run("diff", checkpoint, damaged(checkpoint), "--html", folder, "--force")
    assert done.returncode == 2
    assert f"is a directory. Give a file, such as '{folder / 'report.html'}'" in done.stderr
    assert folder.is_dir()


def test_a_page_that_would_replace_a_checkpoint_is_refused_before_anything_is_read(checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    done = run("diff", checkpoint, checkpoint.with_name("absent"), "--html", checkpoint, "--force")
    assert done.returncode == 2
    assert "is a file, and only another page would be replaced. Choose another path." in done.stderr
    assert checkpoint.read_bytes() == before


def test_dtypes_that_are_ignored(tmp_path: Path) -> None:
    one = write_safetensors(tmp_path / "a.safetensors", {"w": [1.0, 2.0]})
    two = write_safetensors(tmp_path / "b.safetensors", {"w": [1.0, 2.0]}, "F64")
    assert run("diff", one, two, "--ignore-dtypes").returncode == 0


def test_codes_with_scales(checkpoint: Path) -> None:
    numbers, codes = (checkpoint.with_name(name) for name in ("a.safetensors", "b.safetensors"))
    run("convert", checkpoint, numbers, "--include", "backbone.conv", "--rename", "conv=conv.weight")
    run("convert", numbers, codes, "--quantize", "fp8_tensor")
    assert "to compare them as numbers, add --dequantize" in run("diff", numbers, codes).stdout
    assert run("diff", numbers, codes, "--dequantize", "--rtol", "0.07").returncode == 0


@pytest.mark.parametrize("command", ["convert", "average", "delta", "apply-delta", "merge-lora"])
def test_targets_are_here_or_in_s3(command: str, tmp_path: Path) -> None:
    source = write_safetensors(tmp_path / "a.safetensors", {"fc.weight": [1.0, 2.0]})
    words = [source] if command == "convert" else [source, source]
    if command == "apply-delta":
        words[1] = tmp_path / "delta.safetensors"
        assert run("delta", source, source, words[1]).returncode == 0
    elif command == "merge-lora":
        words[1] = tmp_path / "adapter"
        words[1].mkdir()
        (words[1] / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "modules_to_save": ["fc"]}')
        write_safetensors(words[1] / "adapter_model.safetensors", {"base_model.model.fc.weight": [3.0, 4.0]})
    done = run(command, *words, "https://host/x.pth")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "'https://host/x.pth' cannot be written: targets are paths on this machine, and s3://." in said
