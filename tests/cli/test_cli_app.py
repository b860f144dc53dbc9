"""The commands as a whole: their parameters, and what makes shells complete them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mmfsdp_cli.main import app

runner = CliRunner()
CONTEXT = click.Context(app)


def test_a_command_is_imported_when_it_is_run_and_not_before() -> None:
    code = "import sys; from mmfsdp_cli.main import app; app(['formats'], standalone_mode=False); print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'mmfsdp_cli.formats'" in done.stdout
    assert "'mmfsdp_cli.converting'" not in done.stdout


def test_a_misspelt_command_is_told_the_right_one() -> None:
    run = runner.invoke(app, ["inspct", "x"])
    assert run.exit_code == 2
    assert "No such command 'inspct'. Did you mean 'inspect'?" in run.output


@pytest.mark.parametrize("name", app.list_commands(CONTEXT))
def test_each_parameter_has_an_option(name: str) -> None:
    command = app.get_command(CONTEXT, name)
    assert command is not None
    assert command.callback is not None
    taken = [parameter.name for parameter in command.params]
    declared = inspect.signature(inspect.unwrap(command.callback)).parameters
    assert taken == [parameter for parameter in declared if parameter != "context"]
    assert command.get_short_help_str(), "described"
    assert all(parameter.help for parameter in command.params)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_a_script_for_the_shell(shell: str) -> None:
    run = runner.invoke(app, ["completion", shell])
    assert run.exit_code == 0
    assert f"_MMFSDP_CLI_COMPLETE={shell}_complete" in run.stdout


def test_the_script_of_bash_completes(tmp_path: Path) -> None:
    asks = 'COMP_WORDS=(mmfsdp-cli convert --max); COMP_CWORD=2; _mmfsdp_cli_completion mmfsdp-cli; echo "$COMPREPLY"'
    program = tmp_path / "mmfsdp-cli"
    program.write_text(f"#!{sys.executable}\nfrom mmfsdp_cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(runner.invoke(app, ["completion", "bash"]).stdout + asks)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", str(tmp_path / "script")], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--max-shard-size"], done.stderr


def test_an_unknown_shell() -> None:
    run = runner.invoke(app, ["completion", "tcsh"])
    assert run.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in run.stderr
