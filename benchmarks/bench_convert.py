"""`mmfsdp-cli convert` and other tools against `cp -r`: wall time of whole processes in pairs, and their peak memory.

``python -m benchmarks.bench_convert --gb 4 --peers-python /path/to/venv/bin/python`` takes the figures of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import sized, spread

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
CLI = str(Path(sys.executable).with_name("mmfsdp-cli"))
MODES = {  # options, whether cp is followed by sync, at most so many times cp
    "default": ((), True, 1.3),
    "no-fsync": (("--no-fsync",), False, 1.4),
    "no-fsync no-checksums": (("--no-fsync", "--no-checksums"), False, 1.15),
}
STARTUP = 0.5  # seconds that are allowed on top below 4 GB
PEERS_RATIO = 0.2  # of the time of other tools
MEMORY, MEMORY_CAST = 80, 300  # MB
# Source, target, options.
CONVERSIONS = {
    "DCP -> safetensors": ("dcp", "out.safetensors", ()),
    "DCP -> .pth": ("dcp", "out.pth", ()),
    "local -> safetensors": ("local", "out.safetensors", ()),
    ".pth -> safetensors": ("model.pth", "out.safetensors", ()),
    "safetensors -> DCP": ("model.safetensors", "out", ("--to", "dcp", "--ranks", "4")),
    "local, 4 -> 2 ranks": ("local", "out", ("--to", "local", "--ranks", "2")),
}
PEERS = {
    "accelerate merge-weights": "from accelerate.utils import merge_fsdp_weights as f; f({source!r}, {target!r})",
    "torch dcp_to_torch_save": "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; "
    "f({source!r}, {target!r})",
    "torch HF consolidate": "import json, glob; from safetensors import safe_open; "
    "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as f; "
    "names = sorted({{k for p in glob.glob({source!r} + '/*.safetensors') for k in safe_open(p, 'pt').keys()}}); "
    "f({source!r}, {target!r}, {{name: 1 for name in names}}, num_threads=4)",
    "Lightning consolidate": "import sys, runpy; sys.argv = ['x', {source!r}, '--output_file', {target!r}]; "
    "runpy.run_module('lightning.fabric.utilities.consolidate_checkpoint', run_name='__main__')",
}


@dataclass(frozen=True)
class Command:
    """One process to time."""

    words: tuple[str, ...]
    source: Path
    target: Path
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Figure:
    """Seconds and megabytes of one process."""

    seconds: float
    megabytes: float


def run(command: Command, idle: int = 0) -> Figure:
    """Run a process from a clean state, and remove what it wrote; claim so many bytes of idle memory before."""
    _remove(command.target)
    command.prepare()
    os.sync()
    _warm(command.source)
    _claim(idle)
    began = time.perf_counter()
    process = subprocess.Popen(command.words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    complaint = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command.words}: exit code {process.returncode}: {complaint.decode()[-500:]}")
    _remove(command.target)
    return Figure(seconds, usage.ru_maxrss / 1000)


def _warm(path: Path) -> None:
    """Read a checkpoint, so that its pages are cached whatever else was read since."""
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 24):
                    pass


def _claim(nbytes: int) -> None:
    """Touch so many bytes of memory, or most of what is free, in a process of its own.

    The host of a virtual machine may take back memory that lies idle there for two seconds (free page reporting), and
    who touches it first waits for the host: 4 GB took `cp` 11 s in place of 2 s. What runs after something that freed
    gigabytes slowly would be measured so.
    """
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemFree:"))
    count = min(nbytes, int(free.split()[1]) * 1024 * 9 // 10)
    subprocess.run([sys.executable, "-c", f"held = b'1' * {count}"], check=True)


def compare(ours: Command, others: Mapping[str, Command], pairs: int, idle: int = 0) -> dict[str, Any]:
    """Run ours and each other one in turn; return times, peak memory and the ratios of each pair."""
    found: dict[str, list[tuple[Figure, Figure]]] = {name: [] for name in others}
    for pair in range(-1, pairs):  # the first warms the page cache
        for name, other in others.items():
            order = (ours, other) if pair % 2 else (other, ours)
            first, second = run(order[0], idle), run(order[1], idle)
            if pair >= 0:
                found[name].append((first, second) if pair % 2 else (second, first))
    mine = [pair[0] for figures in found.values() for pair in figures]
    return {
        "seconds": asdict(spread([figure.seconds for figure in mine])),
        "megabytes": max(figure.megabytes for figure in mine),
        "against": {
            name: {
                "seconds": asdict(spread([other.seconds for _, other in figures])),
                "megabytes": max(other.megabytes for _, other in figures),
                "ratio": asdict(spread([own.seconds / other.seconds for own, other in figures])),
            }
            for name, figures in found.items()
        },
    }


def copying(source: Path, target: Path, sync: bool) -> Command:
    """Return what copies a file or directory, and waits until it is on disk."""
    text = 'cp -r "$0" "$1"' + (' && find "$1" -type f -exec sync {} +' if sync else "")
    return Command(("sh", "-c", text, str(source), str(target)), source, target)


def converting(source: Path, target: Path, *options: str) -> Command:
    """Return our conversion."""
    return Command((CLI, "convert", str(source), str(target), *options), source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make(kind: str, path: Path, nbytes: int) -> Path:
    subprocess.run([sys.executable, str(HERE / "checkpoint_data.py"), kind, str(path), str(nbytes)], check=True)
    return path


def _convert(source: Path, target: Path, *options: str) -> Path:
    subprocess.run([CLI, "convert", str(source), str(target), *options], check=True, stdout=subprocess.DEVNULL)
    return target


def _say(name: str, result: Mapping[str, Any], limit: float | None, megabytes: float | None, nbytes: int) -> None:
    for other, figures in result["against"].items():
        own, theirs, ratio = result["seconds"], figures["seconds"], figures["ratio"]
        allowed = ""
        if limit is not None:
            most = limit + (STARTUP / theirs["median"] if nbytes < 4_000_000_000 else 0)
            allowed = f"  to reach {most:.2f}: {'yes' if ratio['median'] <= most else 'NO'}"
        print(
            f"{name:44} {own['median']:7.2f} s  {other:26} {theirs['median']:7.2f} s  ratio {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f})  {result['megabytes']:.0f} MB / "
            f"{figures['megabytes']:.0f} MB{allowed}"
            + ("  MEMORY" if megabytes is not None and result["megabytes"] > megabytes else ""),
            flush=True,
        )


def _measure(folder: Path, nbytes: int, pairs: int, peers: str | None) -> dict[str, Any]:
    results: dict[str, Any] = {"bytes": nbytes, "pairs": pairs}
    copy, out = folder / "copy", folder / "out"

    def note(
        name: str, ours: Command, others: Mapping[str, Command], limit: float | None, megabytes: float, idle: int = 0
    ) -> None:
        results[name] = compare(ours, others, pairs, idle)
        _say(name, results[name], limit, megabytes, nbytes)

    dcp = _make("weights", folder / "dcp", nbytes)
    sources = {"dcp": dcp, "local": _convert(dcp, folder / "local", "--to", "local", "--ranks", "4")}
    sources |= {name: _convert(dcp, folder / name) for name in ("model.pth", "model.safetensors")}
    for name, (source, target, options) in [*CONVERSIONS.items()][: sized(len(CONVERSIONS), 1)]:
        for mode, (switches, sync, limit) in [*MODES.items()][: sized(len(MODES), 1)]:
            ours = converting(sources[source], folder / target, *options, *switches)
            cp = {"cp -r, sync" if sync else "cp -r": copying(sources[source], copy, sync)}
            note(f"{name}, {mode}", ours, cp, limit, MEMORY)
    ours = converting(dcp, folder / "out.safetensors", "--dtype", "bf16")
    note("DCP -> safetensors in bfloat16", ours, {"cp -r, sync": copying(dcp, copy, True)}, 3, MEMORY_CAST)
    weights = sources["model.safetensors"]
    if peers is not None:
        _compare_peers(folder, dcp, nbytes, pairs, peers, note)
    for name in ("local", "model.pth", "dcp"):
        _remove(sources[name])

    both = _make("optimizer", folder / "both", nbytes)
    ours = converting(both, folder / "out.safetensors")
    note("weights out of DCP with optimizer", ours, {"cp of the weights": copying(weights, copy, True)}, 1.3, MEMORY)
    _remove(both)
    _remove(weights)

    if sized(False, True):  # the rest differs in sizes only
        return results
    small = _make("small", folder / "small", nbytes * 5 // 4)  # 50,000 tensors at 4 GB
    for target in ("out.safetensors", "out.pth"):
        ours = converting(small, folder / target)
        note(f"many of 100 kB: DCP -> {target[4:]}", ours, {"cp -r, sync": copying(small, copy, True)}, 3, 300)
    _remove(small)

    names = _make("names", folder / "dcp of 4 ranks", sized(10_000, 100))
    one = _make("names_of_one", folder / "dcp", sized(10_000, 100))
    opened = [_convert(one, folder / f"names{suffix}") for suffix in (".safetensors", ".pth")]
    opened += [_convert(one, folder / "local", "--to", "local", "--ranks", "1"), one]
    opened += [_convert(names, folder / "local of 4 ranks", "--to", "local", "--ranks", "4"), names]
    for path in opened:
        figures = [run(Command((CLI, "inspect", str(path)), path, out)) for _ in range(pairs + 1)][1:]
        name = f"inspect 10,000 tensors, {path.name.removeprefix('names.')}"
        seconds = spread([figure.seconds for figure in figures])
        results[name] = {"seconds": asdict(seconds), "megabytes": max(figure.megabytes for figure in figures)}
        print(f"{name:44} {seconds} s  to reach 0.4 s: {'yes' if seconds.median <= 0.4 else 'NO'}", flush=True)
    return results


def _compare_peers(folder: Path, dcp: Path, nbytes: int, pairs: int, python: str, note: Callable[..., None]) -> None:
    huggingface = _make("huggingface", folder / "huggingface", nbytes)
    shutil.copy(folder / "dcp.meta.pt", dcp / "meta.pt")  # what Lightning looks for
    commands = {}
    for name, code in PEERS.items():
        ours = "HF" in name
        target = folder / ("peer.pth" if "torch_save" in name or "Lightning" in name else "peer")
        source = huggingface if ours else dcp
        words = (python, "-c", code.format(source=str(source), target=str(target)))
        prepare = target.mkdir if ours else (lambda: None)
        commands[name] = Command(words, source, target, prepare)
    ours = converting(dcp, folder / "out.safetensors", "--no-fsync")
    for name, command in commands.items():
        try:
            note(f"DCP -> safetensors against {name}", ours, {name: command}, PEERS_RATIO, MEMORY, nbytes * 9 // 4)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
    (dcp / "meta.pt").unlink()
    _remove(huggingface)


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and return seconds, megabytes and ratios; small by default, so that all benchmarks stay quick."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=sized(0.1, 0.001))
    parser.add_argument("--pairs", type=int, default=sized(5, 1))
    parser.add_argument("--peers-python")
    parser.add_argument("--folder", type=Path, help="Where to write; needs 12 times --gb.")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-", dir=options.folder) as folder:
        return _measure(Path(folder), int(options.gb * 1e9), options.pairs, options.peers_python)


if __name__ == "__main__":
    found = main(sys.argv[1:])
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[f"convert, {found['bytes'] / 1e9:g} GB"] = found
    path.write_text(json.dumps(results, indent=1) + "\n")
