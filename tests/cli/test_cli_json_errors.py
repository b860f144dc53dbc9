"""With ``--json``, standard output is JSON whatever happens, and exit codes are as without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click
import pytest
from tests.cli.support import golden, invoke, run, write_safetensors

from mmfsdp_cli.main import app

CONTEXT = click.Context(app)
# What needs numpy asks for it before it reads anything.
NOTHING_THERE = "CheckpointNotFoundError" if importlib.util.find_spec("numpy") else "ConfigError"


def commands() -> list[str]:
    found = []
    for name in app.list_commands(CONTEXT):
        command = app.get_command(CONTEXT, name)
        assert command is not None
        if any(parameter.name == "as_json" for parameter in command.params):
            found.append(name)
    return found


def error_of(output: str) -> dict[str, object]:
    content = json.loads(output)
    assert [*content] == ["error"]
    error = content["error"]
    assert {*error} == {"type", "message", "context", "exit_code"}
    return dict(error)


@pytest.mark.parametrize("name", commands())
def test_usage_errors_of_every_command(name: str) -> None:
    done = run(name, "--json", "--no-such-option")
    assert done.returncode == 2
    error = error_of(done.stdout)
    assert (error["type"], error["exit_code"]) == ("NoSuchOption", 2)
    assert "--no-such-option" in str(error["message"])
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["inspect", "nothing.pth"], 2, "CheckpointNotFoundError"),
        (["inspect", "{whole}", "--tensor", "nothing"], 2, "ConfigError"),
        (["inspect", "{torn}"], 1, "CorruptCheckpointError"),
        (["inspect", "https://me:hu/sh@host/x.pth"], 2, "ConfigError"),
        (["verify", "nothing.pth"], 2, "CheckpointNotFoundError"),
        (["diff", "{whole}", "nothing.pth"], 2, "CheckpointNotFoundError"),
        (["convert", "{whole}", "{whole}"], 2, None),
        (["convert", "{torn}", "{target}"], 1, "CorruptCheckpointError"),
        (["convert", "{whole}", "{target}", "--dtype", "float33"], 2, "ConfigError"),
        (["average", "{whole}", "nothing.pth", "{target}"], 2, NOTHING_THERE),
        (["merge-lora", "{whole}", "nothing", "{target}"], 2, NOTHING_THERE),
        (["delta", "{whole}", "nothing.pth", "{target}"], 2, NOTHING_THERE),
        (["apply-delta", "{whole}", "{whole}", "{target}"], None, None),
        (["plan", "no_such_module:factory"], 2, None),
        (["doctor", "nothing.py"], None, None),
    ],
)
def test_errors(words: list[str], code: int | None, kind: str | None, tmp_path: Path) -> None:
    whole = write_safetensors(tmp_path / "whole.safetensors", {"w": [1.0, 2.0]})
    (tmp_path / "torn.safetensors").write_bytes(whole.read_bytes()[:-3])
    places = {"whole": whole, "torn": tmp_path / "torn.safetensors", "target": tmp_path / "out.safetensors"}
    given = [word.format_map(places) for word in words]
    plain, result = invoke(*given), invoke(*given, "--json")
    assert result.exit_code == plain.exit_code
    error = error_of(result.stdout)
    assert error["exit_code"] == result.exit_code
    assert code in (None, result.exit_code)
    assert kind in (None, error["type"])
    assert "hu/sh" not in result.output


def test_options_that_do_not_fit_together(tmp_path: Path) -> None:
    done = run("inspect", write_safetensors(tmp_path / "x.safetensors", {"w": [1.0]}), "--stats", "--json")
    assert done.returncode == 2
    assert error_of(done.stdout)["type"] == "BadParameter"


def test_context_says_where(tmp_path: Path) -> None:
    torn = golden("epoch_3.pth", tmp_path)
    torn.write_bytes(torn.read_bytes()[:-40])
    error = error_of(invoke("verify", torn.with_name("nothing.pth"), "--json").stdout)
    assert error["context"] == {"file": str(torn.with_name("nothing.pth"))}


def test_without_it_standard_output_stays_empty() -> None:
    assert invoke("inspect", "nothing.pth").stdout == ""
