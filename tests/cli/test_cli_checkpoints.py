"""``mmfsdp-cli inspect`` and ``verify`` as users run them: output, messages and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.support import damaged, golden, invoke, rewritten, run, write_safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return golden("epoch_3.pth", tmp_path)


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    names = ["a\x1b[2Jb", "two\nlines", "x" * 5000, "größe"]
    path = write_safetensors(tmp_path / "in.safetensors", {name: [1.0, 1.0] for name in names})
    for args in (["inspect"], ["inspect", "--tree"], ["inspect", "--tensor", names[0]]):
        result = invoke(args[0], path, *args[1:])
        assert result.exit_code == 0
        assert "a\\x1b[2Jb" in result.output
        assert "\x1b" not in result.output
        assert "\nlines" not in result.output
        assert max(map(len, result.output.splitlines())) < 300
    assert "größe" in invoke("inspect", path).output
    other = write_safetensors(tmp_path / "other.safetensors", {names[0]: [0.0, 0.0]})
    result = invoke("diff", path, other)
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    described = json.loads(invoke("inspect", path, "--json").output)
    assert [entry["name"] for entry in described["tensors"]] == names


def test_inspect(checkpoint: Path) -> None:
    result = invoke("inspect", checkpoint)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tensor dtype shape chunks bytes"
    assert "state_dict/backbone.conv float32 2 × 3 1 24 B" in lines
    assert "torch_zip: 3 tensors, 56 B" in lines
    assert "meta: 1 value: epoch" in lines
    assert "optimizer: 1 tensor, 24 B" in lines

    limited = invoke("inspect", checkpoint, "--limit", 1).stdout
    assert "... and 2 more (--limit 0 shows all)" in limited
    assert "head" not in limited


def test_inspect_json(checkpoint: Path) -> None:
    found = json.loads(invoke("inspect", checkpoint, "--json").stdout)
    assert (found["format"], found["world_size"], found["num_tensors"], found["bytes"]) == ("torch_zip", 1, 3, 56)
    head = {"name": "state_dict/head", "dtype": "bfloat16", "shape": [4], "num_chunks": 1, "bytes": 8}
    assert found["tensors"][1] == head
    assert found["content"]["optimizer"] == {"num_tensors": 1, "bytes": 24}
    assert found["content"]["meta"] == {"num_values": 1, "names": ["epoch"]}


def test_inspect_one_tensor(checkpoint: Path) -> None:
    lines = run("inspect", checkpoint, "--tensor", "head").stdout.splitlines()
    assert lines[0] == "state_dict/head: bfloat16, 4, 8 B"
    assert lines[2].startswith("  [0] of size [4]: ")
    assert run("inspect", checkpoint, "--tensor", "heat").returncode == 2
    assert run("inspect", checkpoint, "--stats").returncode == 2


def test_inspect_tree(checkpoint: Path) -> None:
    lines = [" ".join(line.split()) for line in run("inspect", checkpoint, "--tree").stdout.splitlines()]
    assert lines[0] == "name holds bytes"
    assert lines[2:5] == ["state_dict/ 2 tensors 32 B", "backbone.conv float32 2 × 3 24 B", "head bfloat16 4 8 B"]
    assert "... and " in run("inspect", checkpoint, "--tree", "--limit", 1).stdout
    tree = json.loads(run("inspect", checkpoint, "--tree", "--json").stdout)
    assert (tree["num_tensors"], tree["bytes"]) == (3, 56)


def test_a_wrong_path_is_one_line_without_traceback(checkpoint: Path) -> None:
    done = run("inspect", checkpoint.with_name("epoch3.pth"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: There is no checkpoint at ")
    assert "Did you mean 'epoch_3.pth'?" in done.stderr


def test_damage_and_danger_exit_with_1(checkpoint: Path) -> None:
    done = run("convert", damaged(checkpoint), checkpoint.with_name("out.pth"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: The data of tensor 'state_dict/backbone.conv' in damaged.pth is damaged: ")
    assert not checkpoint.with_name("out.pth").exists()

    dangerous = rewritten(checkpoint, {"state_dict": {}, "meta": shutil.rmtree})
    assert run("inspect", dangerous).returncode == 1
    said = run("inspect", dangerous).stderr
    assert "'shutil.rmtree'" in said
    assert "--trust" in said
    assert "trust=True" not in said
    assert run("inspect", dangerous, "--trust").returncode == 0


def test_verify(checkpoint: Path) -> None:
    done = run("verify", checkpoint, "--jobs", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{checkpoint}: ok (torch_zip, 3 tensors, ")
    done = run("verify", damaged(checkpoint))
    assert done.returncode == 1
    assert done.stderr.startswith("error: The data of tensor 'state_dict/backbone.conv' in damaged.pth is damaged: ")
    assert "damaged.pth: 1 problem (torch_zip" in done.stdout
    assert run("verify", checkpoint.with_name("epoch_4.pth")).returncode == 2


def test_verify_json(checkpoint: Path) -> None:
    result = invoke("verify", damaged(checkpoint), "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["format"], len(report["problems"])) == (False, "torch_zip", 1)
    assert report["problems"][0]["file"].endswith("damaged.pth")


def test_verify_json_lists_every_problem(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    for name in names:
        write_safetensors(tmp_path / name, {name[6:11]: [1.0]})
    index = {"weight_map": {name[6:11]: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = {name: {"size": 1, "crc32": None} for name in names}
    manifest = {"format": "mmfsdp.manifest", "version": 1, "save_id": "s", "world_size": 1, "files": files}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert invoke("verify", tmp_path, "--limit", 2).stderr.splitlines()[2:] == ["... and 3 more (--limit 0 shows all)"]
    problems = json.loads(invoke("verify", tmp_path, "--limit", 2, "--json").stdout)["problems"]
    assert [Path(problem["file"]).name for problem in problems] == names
