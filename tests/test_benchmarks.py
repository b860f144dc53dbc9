"""Imports every benchmark, and runs a sample with its smallest sizes; `nox -s bench -- --quick` runs all of them so."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.forked_scripts import python

ROOT = Path(__file__).parent.parent
README = "\n".join((ROOT / "benchmarks" / name).read_text() for name in ("README.md", "conversions.md"))
NAMES = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py"))
# One of each kind: pairs of timings and peaks on ranks, commands in processes, searches, rehearsals, simulated ranks.
SAMPLE = ["plan", "engines", "guards", "parity", "pretrained", "ranks", "rehearse", "saving", "start", "step"]
SESSIONS = sorted({*re.findall(r"`nox -s bench(?: --)?([^`]*)`", README)})
MODULES = sorted({*re.findall(r"`python -m (benchmarks\.bench_[^`]*)`", re.sub(r"\s+", " ", README))})


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), *words],
        cwd=ROOT,
        env=os.environ | {"MMFSDP_BENCH_QUICK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )


def test_the_documented_commands_are_known() -> None:
    assert {"", " --quick", " step plan"} <= {*SESSIONS}
    assert MODULES
    for words in map(str.split, SESSIONS):
        assert {word for word in words if not word.startswith("--")} <= {*NAMES}


def test_nox_gives_run_py_the_words_of_the_command() -> None:
    assert 'session.run(HERE, "benchmarks/run.py", *session.posargs)' in (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_all_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.bench_{name}").main)


@pytest.mark.sample("plan")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [SAMPLE[:1], SAMPLE[1:]], ids=["plan", "others"])
def test_a_sample_runs(names: list[str]) -> None:
    done = run("benchmarks/run.py", "--quick", *names)  # together: each alone would import torch and start ranks anew
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert re.findall(r"^== (\w+) ==$", done.stdout, re.M) == names


@pytest.mark.parametrize("command", MODULES)
def test_options_of_documented_modules_exist(command: str) -> None:
    module, *options = shlex.split(command)
    main = importlib.import_module(module).main
    done = run("-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert callable(main)
    for option in options:
        assert not option.startswith("--") or option in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stpe"], "there is no benchmark 'stpe'; there are arithmetic, background, convert, "),
        (["plan", "--depth"], "unrecognized arguments: --depth"),
    ],
)
def test_mistakes_are_usage_errors(words: list[str], message: str) -> None:
    done = run("benchmarks/run.py", *words)
    assert done.returncode == 2
    assert message in done.stderr
