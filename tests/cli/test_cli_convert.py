"""``mmfsdp-cli convert`` and ``diff`` as users run them, in a process without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.cli.support import damaged, golden, invoke, read_safetensors, run, write_safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return golden("epoch_3.pth", tmp_path)


def test_convert(checkpoint: Path) -> None:
    target = checkpoint.with_name("out.safetensors")
    done = run("convert", checkpoint, target)
    assert done.returncode == 0, done.stderr
    assert f"Wrote {target} (safetensors): 2 tensors, 32 B in " in done.stdout
    assert "Not written: optimizer, meta." in done.stdout
    assert read_safetensors(target) == {
        "backbone.conv": ("F32", [2, 3], struct.pack("<6f", *range(6))),
        "head": ("BF16", [4], bytes(8)),
    }
    result = invoke("convert", checkpoint, target)
    assert result.exit_code == 2
    assert "exists already." in result.stderr
    assert "--force" in result.stderr
    assert "overwrite" not in result.stderr
    result = invoke("convert", checkpoint, target, "--force", "--keep", "all", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["num_tensors"], report["dropped"]) == (3, ["optimizer/param_groups", "meta"])


def test_to_says_the_format(checkpoint: Path) -> None:
    target = checkpoint.with_name("weights.bin")
    result = invoke("convert", checkpoint, target, "--to", "pth", "--no-checksums", "--keep", "meta")
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("inspect", target, "--json").stdout)["num_tensors"] == 0
    result = invoke("convert", checkpoint, target.with_name("x.bin"))
    assert result.exit_code == 2
    assert "--to" in result.stderr


def test_in_part(checkpoint: Path) -> None:
    target = checkpoint.with_name("out.pth")
    options = ["--include", "backbone.*", "--rename", r"^backbone\.=encoder.", "--verify-output"]
    done = run("convert", checkpoint, target, *options)
    assert done.returncode == 0, done.stderr
    assert "1 tensor, 24 B in " in done.stdout
    assert ", verified." in done.stdout
    assert json.loads(run("inspect", target, "--json").stdout)["tensors"][0]["name"] == "state_dict/encoder.conv"
    done = run("convert", checkpoint, target, "--force", "--rename", "x")
    assert done.returncode == 2
    assert "'x' is not of the form REGEX=REPL" in done.stderr
    assert run("convert", checkpoint, target, "--force", "--include", "neck.*").returncode == 2


def test_a_dry_run_shows_files_new_names_and_the_settings(checkpoint: Path) -> None:
    target = checkpoint.with_name("shards")
    words = ["convert", checkpoint, target, "--max-shard-size", "24B", "--rename", "^backbone=encoder"]
    done = run(*words, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"Would write {target} (safetensors_index): 2 tensors, 32 B."
    assert lines[1:3] == ["Files (2):", "  model-00001-of-00002.safetensors: 24 B"]
    assert "New names (1):" in lines
    assert "  backbone.conv -> encoder.conv" in lines
    settings = json.loads(done.stdout.partition("Settings, for --config:")[2])
    assert (settings["max_shard_size"], settings["keep"]) == (24, "model")
    assert not target.exists()
    (checkpoint.parent / "settings.json").write_text(json.dumps(settings))
    done = run("convert", checkpoint, target, "--config", checkpoint.parent / "settings.json", "--json", "--no-fsync")
    assert json.loads(done.stdout)["files"]["model-00002-of-00002.safetensors"] == 8
    assert "encoder.conv" in run("inspect", target).stdout
    limited = run(*words, "--force", "--dry-run", "--limit", 1).stdout
    assert "... and 1 more (--limit 0 shows all)" in limited


def test_an_option_wins_over_the_file_of_settings(checkpoint: Path) -> None:
    settings = checkpoint.with_name("a.toml")
    settings.write_text('include = ["head"]\nto = "safetensors"\n')
    target = checkpoint.with_name("out")
    assert run("convert", checkpoint, target, "--config", settings, "--include", "backbone.**").returncode == 0
    assert [*read_safetensors(target)] == ["backbone.conv"]
    settings.write_text("includ = 1\n")
    done = run("convert", checkpoint, target, "--config", settings)
    assert done.returncode == 2
    assert "includ" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-shard-size", "30"], "--max-shard-size"),
        (["--dtype", "bf61"], "--dtype: "),
        (["--ranks", "x", "--to", "dcp"], "--ranks"),
        (["--keep", "optimizer", "--drop", "meta"], "--drop"),
        (["--publish", "--keep", "all"], "--publish"),
        (["--use-ema"], "--use-ema"),
        (["--from", "nonsense"], "--from"),
        (["--to", "nonsense"], "--to"),
    ],
)
def test_errors_name_options_and_no_python(checkpoint: Path, words: list[str], said: str) -> None:
    result = invoke("convert", checkpoint, checkpoint.with_name("out.pth"), *words)
    assert result.exit_code == 2
    assert said in result.stderr
    for python in ("=True", "=False", "None", "Conversion.", "(config: ", "Traceback"):
        assert python not in result.stderr


def test_a_size_needs_a_unit(checkpoint: Path) -> None:
    result = invoke("convert", checkpoint, checkpoint.with_name("out"), "--max-shard-size", "30")
    assert result.exit_code == 2
    assert "30MiB" in result.stderr


def test_publish(checkpoint: Path) -> None:
    report = json.loads(run("convert", checkpoint, checkpoint.with_name("m.pth"), "--publish", "--json").stdout)
    assert run("inspect", report["path"]).returncode == 0


def test_diff(checkpoint: Path) -> None:
    assert run("convert", checkpoint, checkpoint.with_name("out.safetensors")).returncode == 0
    done = run("diff", checkpoint, checkpoint.with_name("out.safetensors"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Not compared: a: optimizer, a: meta." in done.stdout
    assert "the same: 2 tensors compared (model) in " in done.stdout

    done = run("diff", checkpoint, damaged(checkpoint))
    assert done.returncode == 1
    assert "state_dict/backbone.conv: " in done.stdout
    assert "different: 1 of 3 tensors differ (all) in " in done.stdout
    assert "--keep model" not in done.stdout
    run("convert", checkpoint, checkpoint.with_name("weights.pth"))
    said = run("diff", checkpoint, checkpoint.with_name("weights.pth")).stdout
    assert "the weights alone, add --keep model" in said
    assert "different: 1 of 3 tensors and 1 other value differ (all) in " in said
    assert len(json.loads(run("diff", checkpoint, damaged(checkpoint), "--json").stdout)["values"]) == 1
    assert run("diff", checkpoint, "nowhere.pth").returncode == 2
    assert run("diff", checkpoint, checkpoint, "--keep", "optimiser").returncode == 2


def test_diff_of_dtypes_suggests_to_ignore_them(tmp_path: Path) -> None:
    one = write_safetensors(tmp_path / "a.safetensors", {"w": [1.0, 2.0], "only": [1.0]})
    two = write_safetensors(tmp_path / "b.safetensors", {"w": [1.0, 2.0]}, "F64")
    done = run("diff", one, two)
    assert done.returncode == 1
    assert "w: float32 and float64" in done.stdout
    assert "--ignore-dtypes" in done.stdout
    assert f"Only in {one} (1):" in done.stdout


def test_every_list_has_a_limit(tmp_path: Path) -> None:
    one = write_safetensors(tmp_path / "a.safetensors", {f"w{number}": [1.0] for number in range(9)})
    two = write_safetensors(tmp_path / "b.safetensors", {"v": [1.0]})
    done = run("diff", one, two, "--limit", 3)
    assert "  ... and 6 more (--limit 0 shows all)" in done.stdout.splitlines()
    assert "w8" in run("diff", one, two, "--limit", 0).stdout
    report = json.loads(run("diff", one, two, "--limit", 3, "--json").stdout)
    assert (report["num_differing"], report["num_tensors"]) == (10, 10)
    assert report["only_in_a"] == [f"w{number}" for number in range(9)], "a program gets all of it"


def test_a_target_in_no_directory_is_told_what_to_do(checkpoint: Path) -> None:
    result = invoke("convert", checkpoint, checkpoint.with_name("nowhere") / "out.pth")
    assert result.exit_code == 2
    assert f"the directory '{checkpoint.with_name('nowhere')}' does not exist. Create it first." in result.stderr


@pytest.mark.exhaustive
def test_formats_are_those_that_are_read_and_written(checkpoint: Path) -> None:
    listed = {item["name"]: item for item in json.loads(run("formats", "--json").stdout)}
    assert {"dcp", "rank_local", "torch_legacy", "torch_index", "mmengine_local"} <= {*listed}
    written = {name for name, item in listed.items() if item["writes"]}
    assert written == {"safetensors", "torch_zip", "safetensors_index", "huggingface", "dcp", "rank_local", "gguf"}
    (like := checkpoint.with_name("like")).mkdir()
    (like / "config.json").write_text("{}")
    for name in written - {"gguf"}:  # holds models that are like Llama
        target = checkpoint.with_name(f"as_{name}")
        more = ["--like", like] if name == "huggingface" else []
        report = json.loads(run("convert", checkpoint, target, "--to", name, "--json", *more).stdout)
        assert report["format"] == name == json.loads(invoke("inspect", target, "--json").stdout)["format"]
        assert invoke("verify", target).exit_code == 0
        assert invoke("diff", checkpoint, target, "--keep", "model").exit_code == 0
    lines = run("formats").stdout.splitlines()
    assert lines[0].split()[:3] == ["format", "reads", "writes"]
    assert [line.split()[0] for line in lines[2:] if line[0] != " "] == [*listed]


def test_recipes_are_listed_and_printed() -> None:
    listed = json.loads(run("recipes", "--json").stdout)
    assert "meta-llama-to-hf" in [item["name"] for item in listed]
    lines = run("recipes").stdout.splitlines()
    assert lines[0].split() == ["recipe", "needs", "what", "it", "does"]
    assert len(lines) == 2 + len(listed)
    printed = run("recipes", "meta-llama-to-hf").stdout
    assert printed == Path(next(item["path"] for item in listed if item["name"] == "meta-llama-to-hf")).read_text()
    done = run("recipes", "meta-lama-to-hf")
    assert done.returncode == 2
    assert "Did you mean 'meta-llama-to-hf'" in done.stderr


def test_a_recipe(checkpoint: Path) -> None:
    recipe = checkpoint.with_name("recipe.toml")
    recipe.write_text('[[rules]]\nrenam = {head = "top"}')
    done = run("convert", checkpoint, checkpoint.with_name("out.pth"), "--recipe", recipe)
    assert "Did you mean 'rename'? (config: recipe.toml: rules[0])" in done.stderr  # a key, not --rename
    recipe.write_text('unmatched = "drop"\n[[rules]]\nrename = {head = "top"}')
    done = run("convert", checkpoint, checkpoint.with_name("out.pth"), "--recipe", recipe)
    assert "unmatched is 'drop', expected 'keep' or 'error'. (config: unmatched)" in done.stderr  # not --drop, --keep
    recipe.write_text(
        '[values]\nn = ["n"]\n[[rules]]\nrename = { "head" = "tail" }\n'
        '[[rules]]\n[rules.split]\nwhole = "backbone.conv"\nparts = ["a", "b"]\ndim = 1\nsizes = ["n", 1]\n'
    )
    target = checkpoint.with_name("out.safetensors")
    done = run("convert", checkpoint, target, "--recipe", recipe)
    assert done.returncode == 2
    assert "needs the value 'n'. Give it in --recipe-value, as n=8, or put a config.json" in done.stderr
    assert run("convert", checkpoint, target, "--recipe", recipe, "--recipe-value", "n").returncode == 2
    assert "'x' is not a whole number" in run("convert", checkpoint, target, "--recipe-value", "n=x").stderr
    done = run("convert", checkpoint, target, "--recipe", recipe, "--recipe-value", "n=2")
    assert done.returncode == 0, done.stderr
    assert read_safetensors(target) == {
        "tail": ("BF16", [4], bytes(8)),
        "a": ("F32", [2, 2], struct.pack("<4f", 0, 1, 3, 4)),
        "b": ("F32", [2, 1], struct.pack("<2f", 2, 5)),
    }
    back = checkpoint.with_name("back.safetensors")
    done = run("convert", target, back, "--recipe", recipe, "--recipe-value", "n=2", "--inverse")
    assert done.returncode == 0, done.stderr
    assert read_safetensors(back)["backbone.conv"] == ("F32", [2, 3], struct.pack("<6f", *range(6)))


def test_continues(tmp_path: Path) -> None:
    source = golden("epoch_3.pth", tmp_path)
    for _ in range(2):
        done = run("convert", source, tmp_path / "out.safetensors", "--continue", "--force")
        assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_3.pth", "out.safetensors"]
