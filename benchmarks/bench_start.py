"""Time to start: `import mmfsdp`, and `mmfsdp-cli --help` as a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import sized, spread, timed

__all__ = ["main"]

RUNS = sized(11, 1)


def main() -> dict[str, Any]:
    """Measure and return seconds."""
    bare = [sys.executable, "-c", "pass"]
    importing = [sys.executable, "-c", "import mmfsdp"]
    settings = [sys.executable, "-c", "from mmfsdp import ShardConfig"]
    command = [str(Path(sys.executable).with_name("mmfsdp-cli")), "--help"]
    times: dict[str, list[float]] = {
        "python": [],
        "import mmfsdp": [],
        "from mmfsdp import ShardConfig": [],
        "--help": [],
    }
    for run in range(RUNS + 1):
        for name, words in zip(times, (bare, importing, settings, command), strict=True):
            seconds = timed(lambda words=words: subprocess.run(words, check=True, stdout=subprocess.DEVNULL))  # type: ignore[misc]
            if run:
                times[name].append(seconds)
    results = {
        "import mmfsdp": spread([a - b for a, b in zip(times["import mmfsdp"], times["python"], strict=True)]),
        "import ShardConfig": spread(
            [a - b for a, b in zip(times["from mmfsdp import ShardConfig"], times["python"], strict=True)]
        ),
        "mmfsdp-cli --help": spread(times["--help"]),
    }
    for name, value in results.items():
        print(f"{name:20} {value} s", flush=True)
    return {name: vars(value) for name, value in results.items()}


if __name__ == "__main__":
    main()
