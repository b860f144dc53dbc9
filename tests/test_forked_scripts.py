"""Processes that are forked for tests run, print and end as those of the real interpreter."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked_scripts import environ_with_commands, python

PRINTS = "import os, sys; print(__name__, sys.argv, os.getcwd(), os.environ['OWN'], sys.stdin.read()); "
CASES = {
    "code": ("-c", PRINTS, "one", "-c"),
    "a script": ("-u", "script.py", "--two"),
    "a module": ("-m", "script", "three"),
    "an exit code": ("-c", "import sys; sys.exit(7)"),
    "a message": ("-c", "import sys; sys.exit('it ends')"),
    "an exception": ("-c", "raise ValueError('it fails')"),
    "a file that is not there": ("nowhere.py",),
    "an interrupt": ("-c", "raise KeyboardInterrupt"),
    "a signal": ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
    "at exit": ("-c", "import atexit; atexit.register(print, 'it ends')"),
    "a late thread": ("-c", "import threading; threading.Timer(0.1, print, ['late']).start()"),
    "other options": ("-S", "-c", "import sys; print(sys.flags.no_site)"),
    "children": ("-c", "import subprocess, sys; print(subprocess.call([sys.executable, '-c', 'raise SystemExit(5)']))"),
}


def ended(executable: str, words: tuple[str, ...], folder: Path) -> tuple[int, str, str]:
    environ = {**os.environ, "OWN": "value", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [executable, *words], cwd=folder, env=environ, input="given", capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1].replace(sys.executable, "python")


@pytest.mark.parametrize("name", CASES)
def test_they_end_as_real_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    code, out, last = ended(python(), CASES[name], tmp_path)
    expected = ended(sys.executable, CASES[name], tmp_path)
    assert (code, out) == expected[:2]
    assert last == expected[2]


def test_signals_reach_them_and_they_end_with_who_started_them() -> None:
    waits = (
        "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(9)); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    for number, code in ((signal.SIGTERM, 9), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([python(), "-c", waits], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            process.send_signal(number)
            assert process.wait(20) == code
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.exhaustive
def test_clients_killed_at_any_moment_disturb_nobody_else() -> None:
    """While they connect, before they have said what to run, and just when it ends."""
    moments = random.Random(0)
    for _ in range(15):
        clients = [subprocess.Popen([python(), "-c", f"import time; time.sleep({n / 500})"]) for n in range(8)]
        time.sleep(moments.uniform(0, 0.2))
        for client in clients:
            client.kill()
        for client in clients:
            client.wait(20)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(Path(python()).with_name("socket")))
        assert subprocess.run([python(), "-c", "exit(7)"], timeout=60, check=False).returncode == 7
    assert subprocess.run([python(), "-c", "exit(8)"], timeout=60, check=False).returncode == 8


def test_without_the_server_clients_are_the_real_interpreter(tmp_path: Path) -> None:
    for name in ("python", "executable"):
        shutil.copy(Path(python()).with_name(name), tmp_path, follow_symlinks=False)
    done = subprocess.run([tmp_path / "python", "-c", "exit(6)"], timeout=60, check=False)
    assert done.returncode == 6


def test_commands_are_those_of_this_environment() -> None:
    environ = environ_with_commands()
    for command in (["torchrun", "--help"], ["python", "-c", "print('usage')"]):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("usage")
