"""The commands as a whole: parameters, help, completion, and what is not imported."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import click
import pytest
from tests.cli.support import golden, invoke, run, write_safetensors

from mmfsdp.basics import pip_install
from mmfsdp.checkpoint import Conversion
from mmfsdp_cli import __version__
from mmfsdp_cli.main import app
from mmfsdp_cli.options.choices import BatchChoice, ModelChoice, StepChoice
from mmfsdp_cli.printing.help import summary

CONTEXT = click.Context(app)
COMMANDS = app.list_commands(CONTEXT)
PLANNING = {"plan", "rehearse", "fit", "measure", "prove"}
WRITING = {"convert", "average", "merge-lora", "delta", "apply-delta"}


def parameters(name: str) -> dict[str, click.Parameter]:
    command = app.get_command(CONTEXT, name)
    assert command is not None
    return {parameter.name or "": parameter for parameter in command.params}


def test_a_command_is_imported_only_when_it_is_run() -> None:
    code = "import sys; from mmfsdp_cli.main import app; app(['formats'], standalone_mode=False); print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'mmfsdp_cli.commands.formats'" in done.stdout
    assert "'mmfsdp_cli.commands.converting'" not in done.stdout
    code = "import sys; from mmfsdp_cli.main import main\ntry: main()\nfinally: print([*sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert "'mmfsdp_cli.main'" in done.stderr
    assert "'mmfsdp_cli.commands.converting'" not in done.stderr


@pytest.mark.parametrize("words", [[], ["plan"], ["rehearse"], ["fit"], ["measure"], ["doctor"], ["convert"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    heavy = "sorted({'torch', 'pydantic', 'numpy', 'mmfsdp.checkpoint', 'mmfsdp.config'} & set(sys.modules))"
    code = f"import sys; from mmfsdp_cli.main import main\ntry: main()\nfinally: print({heavy}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_misspelt_command_suggests_the_right_one() -> None:
    result = run("inspct", "x")
    assert result.returncode == 2
    assert "No such command 'inspct'. Did you mean 'inspect'?" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect"], "error: Missing argument 'PATH'."),
        (["inspect", "x", "y"], "error: Got unexpected extra argument (y)"),
        (["verify", "x", "--jbos"], "error: No such option"),
        (["inspect", ""], "error: Invalid value for 'PATH': The path is empty. For the current directory, write '.'."),
        (["convert", "x", "", "--to", "dcp"], "error: Invalid value for 'TARGET': The path is empty."),
        (["inspect", "x", "--limit", "all"], "error: Invalid value for '--limit': 'all'"),
        (
            ["completion", "csh"],
            "error: Invalid value for '{bash|zsh|fish}': 'csh' is not one of 'bash', 'zsh', 'fish'.",
        ),
        (["completion"], "error: Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
    ],
)
def test_errors_in_arguments_look_like_others(words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    said, usage, help_ = done.stderr.splitlines()
    assert said.startswith(message)
    assert usage.startswith(f"Usage: mmfsdp-cli {words[0]} [OPTIONS]")
    assert help_ == f"Help: mmfsdp-cli {words[0]} --help"


def test_without_a_command_the_help_is_shown() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run("--help").stdout


def test_usage() -> None:
    assert run("--version").stdout == run("-V").stdout == f"mmfsdp-cli {__version__}\n"
    as_module = subprocess.run([sys.executable, "-m", "mmfsdp_cli", "--version"], capture_output=True, text=True)
    assert as_module.stdout == run("--version").stdout
    text = run("--help").stdout
    assert all(re.search(rf"^  {name} ", text, re.M) for name in COMMANDS)
    assert "..." not in text.partition("Commands:")[2], "summaries are not cut off"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_summary_of_each(name: str) -> None:
    command = app.get_command(CONTEXT, name)
    assert command is not None
    assert summary(command) in " ".join(run("--help").stdout.split())


def test_quiet_commands_print_errors_only(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    write_safetensors(source, {"w": [1.0, 2.0]})
    for words in (["inspect", source], ["verify", source], ["convert", source, tmp_path / "a.pth"], ["formats"]):
        done = run(*words, "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a.pth").is_file()
    assert json.loads(run("inspect", source, "-q", "--json").stdout)["num_tensors"] == 1
    source.write_bytes(source.read_bytes()[:-1])
    done = run("verify", source, "-q")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")


def test_verbose_errors_say_where_they_were_raised(tmp_path: Path) -> None:
    short, long = (run("inspect", tmp_path / "none.pth", *words).stderr for words in ((), ("-v",)))
    assert short.startswith("error: There is no checkpoint")
    assert long.endswith(short)
    assert "Traceback" in long
    assert "opening.py" in long


def test_formats_fit_a_narrow_terminal() -> None:
    assert max(map(len, run("formats").stdout.splitlines())) <= 80


def test_a_recipe_as_json() -> None:
    found = json.loads(run("recipes", "megatron-llama-to-hf", "--json").stdout)
    assert found["name"] == "megatron-llama-to-hf"
    assert found["recipe"] == tomllib.loads(run("recipes", "megatron-llama-to-hf").stdout)


def test_a_directory_is_inspected_by_its_only_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", {"w": [1.0, 2.0]})
    assert "\nweights.safetensors, safetensors: 1 tensor, 8 B\n" in run("inspect", tmp_path).stdout
    assert "\nsafetensors: 1 tensor, 8 B\n" in run("inspect", tmp_path / "weights.safetensors").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_parameter_has_an_option_and_a_help_text(name: str) -> None:
    command = app.get_command(CONTEXT, name)
    assert command is not None
    assert command.callback is not None
    declared = inspect.signature(inspect.unwrap(command.callback)).parameters
    taken = {*parameters(name)} - {"quiet", "verbose"}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values()):
        # What is not declared is a field of Conversion, the opposite of one, or common to all commands that write.
        common = {"reference", "model", "model_arguments", "dry_run", "limit", "as_json"}
        settings = {field.name for field in fields(Conversion)} - {"verify", "fsync"}
        if name != "convert":  # they work on the weights
            settings -= {"keep", "drop", "use_ema", "publish"}
        assert taken - {*declared} == common | settings | {"no_checksums", "no_fsync"}
    else:
        for group, record in (("chosen", ModelChoice), ("step", BatchChoice if name == "prove" else StepChoice)):
            if group in declared:
                taken = taken - {field.name for field in fields(record)} | {group}
        assert taken == {*declared} - {"context"}
    assert all(getattr(parameter, "help", None) for parameter in command.params)
    text = invoke(name, "--help").output
    for parameter in command.params:
        assert (max(parameter.opts, key=len) if isinstance(parameter, click.Option) else "Arguments:") in text


def test_options_are_called_the_same_in_every_command() -> None:
    spelled: dict[str, set[str]] = {}
    for name in COMMANDS:
        for parameter in parameters(name).values():
            if isinstance(parameter, click.Option):
                spelled.setdefault(parameter.name or "", set()).update(parameter.opts)
    assert [options for options in spelled.values() if len(options) > 1] == [{"-q", "--quiet"}, {"-v", "--verbose"}]
    for option, commands in {
        "as_json": {*COMMANDS} - {"completion"},
        "limit": {"inspect", *WRITING, "verify", "diff", "compare", "plan", "rehearse", "measure", "doctor"},
        "batch": PLANNING - {"plan"},
        "quiet": {*COMMANDS},
        "verbose": {*COMMANDS},
        "keep": {"convert", "diff"},
        "jobs": {*WRITING, "verify", "diff"},
        "ranks": {*WRITING, *PLANNING, "doctor"},
        "config": {"convert", *PLANNING},
        "every_unit": {"plan", "rehearse", "measure", "doctor"},
        "trust": {"inspect", *WRITING, "verify", "diff"},
        "reference": {"inspect", *WRITING, "verify", "diff"},
    }.items():
        having = {name for name in COMMANDS if isinstance(parameters(name).get(option), click.Option)}
        assert having == commands, option
    taken = {
        name: option.metavar for name in COMMANDS if isinstance(option := parameters(name).get("ranks"), click.Option)
    }
    assert {name for name, metavar in taken.items() if metavar == "N"} == {"fit", "prove"}, (
        "they arrange ranks themselves"
    )


@pytest.mark.parametrize("path", ["s3://bucket/run/epoch_1", "gs://b/x.pth", "hf://org/model", "https://host/x.pth"])
def test_urls_are_only_read(path: str, tmp_path: Path) -> None:
    for words in (["merge-lora", tmp_path, path, "x"], ["convert", path, "x", "--config", path]):
        result = invoke(*words)
        assert result.exit_code == 2
        assert "is only read, and not here: give a path on this machine." in " ".join(result.stderr.split())


def test_a_driver_that_is_not_installed() -> None:
    result = invoke("inspect", "nonsense://bucket/x.pth")
    assert result.exit_code == 2
    assert "nonsense://" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_a_script_for_the_shell(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert f"_MMFSDP_CLI_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("convert --max", "--max-shard-size"),
        ("convert a b --dtype bf", "bfloat16"),
        ("convert a b --to saf", "safetensors"),
        ("convert a b --from torch_l", "torch_legacy"),
        ("diff a b --keep m", "model"),
    ],
)
def test_bash_completes(tmp_path: Path, words: str, completed: str) -> None:
    count = len(words.split())
    asks = f"COMP_WORDS=(mmfsdp-cli {words}); COMP_CWORD={count}; _mmfsdp_cli_completion mmfsdp-cli; echo $COMPREPLY"
    program = tmp_path / "mmfsdp-cli"
    program.write_text(f"#!{sys.executable}\nfrom mmfsdp_cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(invoke("completion", "bash").stdout + asks)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", str(tmp_path / "script")], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split()[:1] == [completed], done.stderr


NEEDING_NUMPY = {
    "inspect --stats": "inspect {a} --tensor head --stats",
    "convert --dtype": "convert {a} {t}/out.pth --dtype bf16",
    "convert --quantize": "convert {a} {t}/out.safetensors --quantize fp8",
    "average": "average {a} {a} {t}/out.pth",
    "merge-lora": "merge-lora {a} {t}/adapter {t}/out.pth",
    "delta": "delta {a} {a} {t}/out.pth",
    "apply-delta": "apply-delta {a} {a} {t}/out.pth",
    "diff --rtol": "diff {a} {a} --rtol 0.1",
    "diff --atol": "diff {a} {a} --atol 0.1",
    "diff --ignore-dtypes": "diff {a} {a} --ignore-dtypes",
    "diff --dequantize": "diff {a} {a} --dequantize",
    "diff --html": "diff {a} {a} --html {t}/page.html",
}


def test_help_says_what_needs_numpy(tmp_path: Path) -> None:
    said = set()
    for name in COMMANDS:
        command = app.get_command(CONTEXT, name)
        assert command is not None
        if "Needs numpy." in (command.help or ""):
            said.add(name)
        elif name in WRITING - {"convert"}:
            continue
        for parameter in () if name in said else command.params:
            if "Needs numpy." in (getattr(parameter, "help", None) or ""):
                said.add(f"{name} {max(parameter.opts, key=len)}")
    assert said == {*NEEDING_NUMPY}

    lines = [
        *NEEDING_NUMPY.values(),
        "convert {a} {t}/out.pth",
        "verify {a}",
        "diff {a} {t}/out.pth --keep model",
        "inspect {a}",
    ]
    code = (
        "import json, sys; sys.modules['numpy'] = None\n"
        "from click.testing import CliRunner; from mmfsdp_cli.main import app\n"
        "found = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[one.exit_code, one.output] for one in found]))"
    )
    source = golden("epoch_3.pth", tmp_path)
    words = json.dumps([line.format(a=source, t=tmp_path).split() for line in lines])
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, check=True)
    for line, (exit_code, output) in zip(lines, json.loads(done.stdout), strict=True):
        needs = line in NEEDING_NUMPY.values()
        assert exit_code == (2 if needs else 0), (line, output)
        assert ("needs numpy" in output) == needs, (line, output)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_what_completes_a_word(shell: str) -> None:
    code = [sys.executable, "-c", "from mmfsdp_cli.main import main; main()"]

    def ask(**variables: str) -> str:
        return subprocess.run(code, env=os.environ | variables, capture_output=True, text=True, check=False).stdout

    assert ask(_MMFSDP_CLI_COMPLETE=f"{shell}_source").strip() == run("completion", shell).stdout.strip()
    last = "--max" if shell == "fish" else "2"  # as their scripts give it
    words = {"COMP_WORDS": "mmfsdp-cli convert --max", "COMP_CWORD": last}
    assert "--max-shard-size" in ask(_MMFSDP_CLI_COMPLETE=f"{shell}_complete", **words)


def test_the_help_says_which_commands_need_torch_and_numpy() -> None:
    said = " ".join((app.epilog or "").split())
    for what in ("torch", "numpy"):
        needing = [name for name in COMMANDS if f"Needs {what}." in (app.get_command(CONTEXT, name).help or "")]  # type: ignore[union-attr]
        assert f"{', '.join(needing[:-1])} and {needing[-1]} need {what}" in said


def test_an_unknown_shell() -> None:
    result = invoke("completion", "tcsh")
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


def test_plan_and_doctor_without_torch_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.py").touch()
    missing = "import sys; sys.modules['torch'] = None\n"
    code = f"{missing}from mmfsdp_cli.main import main; main()"
    for words, said in (
        (["plan", "package.module:factory"], "mmfsdp-cli plan needs torch 2.9 or newer, which is not installed."),
        (["plan", str(tmp_path / "config.py")], f"Install it with: {pip_install('mmfsdp[torch]')}"),
        (["inspect", str(tmp_path), "--model", "a:b"], "--model needs torch 2.9 or newer"),
        (["doctor", str(tmp_path / "config.py")], "pip install "),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
