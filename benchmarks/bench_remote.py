"""How much of a link's bandwidth a conversion from a server uses, and its memory: 50 ms of latency, a limited rate."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measuring import MB, sized, spread

__all__ = ["main"]

NBYTES = sized(600_000_000, 20_000_000)
RUNS = sized(3, 1)
LATENCY = 0.05  # seconds before each answer
RATE = 30 * MB  # bytes per second; the server, in Python, must not be what limits
LEAST, MOST = 0.8, 256  # of the bandwidth; MB

_WRITE = """
import sys, torch
from mmfsdp.checkpoint import convert
folder, nbytes = sys.argv[1], int(sys.argv[2])
state = {f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(max(2, nbytes >> 22))}
torch.save({"state_dict": state}, f"{folder}/file.pth")
convert(f"{folder}/file.pth", f"{folder}/file.safetensors", fsync=False)
convert(f"{folder}/file.pth", f"{folder}/dcp", to="dcp", ranks=4, fsync=False)
"""
_SERVE = """
import sys
from pathlib import Path
from tests.core.web_server import serving
with serving(Path(sys.argv[1])) as web:
    web.latency, web.rate = map(float, sys.argv[2:])
    print(web.url, flush=True)
    sys.stdin.read()
"""
_CONVERT = """
import json, re, sys, time
from mmfsdp.checkpoint import convert
began = time.perf_counter()
report = convert(sys.argv[1], sys.argv[2], fsync=False)
seconds = time.perf_counter() - began
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000
print(json.dumps([report.bytes / seconds, peak]))
"""


def main() -> dict[str, Any]:
    """Measure, print and return the figures."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as folder:
        _run(_WRITE, folder, str(NBYTES))
        with _served(folder) as url:
            for name in ("file.safetensors", "file.pth", "dcp"):
                found = []
                for number in range(RUNS):
                    target = Path(folder, f"{name}-{number}.safetensors")
                    found.append(json.loads(_run(_CONVERT, f"{url}/{name}", str(target))))
                    target.unlink()
                share, peak = spread([rate / RATE for rate, _ in found]), max(peak for _, peak in found)
                results[name] = {"share": share.median, "peak_mb": peak}
                verdict = "reached" if share.median >= LEAST and peak <= MOST else "MISSED"
                print(
                    f"{name}: {share} of the bandwidth, headers included; {peak:.0f} MB; at least {LEAST}, at most "
                    f"{MOST} MB: {verdict}",
                    flush=True,
                )
    return results


def _run(code: str, *words: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def _served(folder: str) -> Iterator[str]:
    words = [sys.executable, "-c", _SERVE, folder, str(LATENCY), str(RATE)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


if __name__ == "__main__":
    main()
