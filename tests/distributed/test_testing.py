"""The ranks of mmfsdp.testing end with the process that started them, whichever way that was started itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing
import sys

from mmfsdp.testing import run_ranks


def double(rank):
    return 2 * rank


def child():
    print(run_ranks(double, 2), flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    sys.exit(f"{code}")
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ranks_of_a_child_end_with_it(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["[0, 2]"], "0\n")  # gloo of torch 2.9 prints, too
