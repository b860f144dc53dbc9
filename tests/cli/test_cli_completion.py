"""What makes shells complete commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mmfsdp_cli.main import app

runner = CliRunner()


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
