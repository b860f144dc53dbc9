"""What one rank does to plan, shard, save and load as ranks grow: 8 to 2,048 simulated ranks, one model."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import mmfsdp
from benchmarks.measuring import sized
from benchmarks.simulated import Work, counted_reads, run_threads
from mmfsdp.basics.boxes import EvenBoxes, sharded_box
from mmfsdp.checkpoint import convert
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.dcp.index import FILE
from mmfsdp.checkpoint.formats.dcp.writer import Items, plan_metadata, plan_rank
from mmfsdp.checkpoint.manifest import FileEntry, write_manifest
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import Box
from mmfsdp.saving.reading.contents import open_shared, open_weights
from mmfsdp.saving.reading.source import Source, lazy_tensors
from mmfsdp.saving.writing.archives import write_archive
from mmfsdp.saving.writing.memory import entry_in_memory
from mmfsdp.saving.writing.pieces import write_file
from mmfsdp.saving.writing.publishing import DirectorySave
from mmfsdp.state.lazy_tensors import LazyTensor, locate

__all__ = ["main"]

RANKS = sized((8, 64, 512, 2048), (2,))
TENSORS, ROWS, COLUMNS = 8, 4096, 64  # 8 MiB in float32
MANY = sized(200, 8)  # tensors of what `load_pretrained` reads
RESUMED = sized((64, 1000), (4,))  # tensors of what a run resumes from, each of a row per rank
PRESENT = 16  # ranks that resume, of all; the others would do what these do
BLOCKS = 24
SAVE = "0123456789abcdef"
LIMIT = 2.0  # times the work of a rank among 8


def main() -> dict[str, Any]:
    """Measure, print and return the figures."""
    results: dict[str, Any] = {}
    for size in RANKS:
        found: dict[str, Any] = {"plan": {"seconds": planning(size)}, "shard": {"seconds": sharding(size)}}
        found["plan a sharded save"] = planning_files(size)
        with tempfile.TemporaryDirectory(prefix="mmfsdp-bench-") as folder:
            found["save"] = described(run_threads(lambda scope, f=folder: saving(scope, f), size))
            whole = Path(folder, "whole.pth")
            torch.save({f"layers.{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(TENSORS)}, whole)
            for kind in ("local", "dcp"):
                path = Path(folder, kind)
                convert(whole, path, to=kind, ranks=size, fsync=False)
                with counted_reads():
                    found[f"load {kind}"] = described(run_threads(lambda scope, p=path: loading(scope, p), size))
            for kind, tensors in itertools.product(("local", "dcp"), RESUMED):
                path, present = Path(folder, f"{tensors} {kind}"), spread_ranks(size)
                (write_local if kind == "local" else write_dcp)(path, tensors, size, present)
                run_threads(lambda scope, p=path: loading(scope, p), size, present)  # caches what it imports
                with counted_reads():
                    works = run_threads(lambda scope, p=path: loading(scope, p), size, present)
                found[f"resume {kind}, {tensors} tensors"] = described(works)
            many = Path(folder, "many.safetensors")
            save_file({f"layers.{i}.weight": torch.zeros(ROWS, 2, dtype=torch.bfloat16) for i in range(MANY)}, many)
            with counted_reads():
                found["load pretrained"] = described(run_threads(lambda scope, p=many: pretrained(scope, p), size))
        results[str(size)] = found
        for what, figures in found.items():
            shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"{size:5} ranks, {what}: {shown}", flush=True)
    for what in [what for what in results[str(RANKS[0])] if what not in ("plan", "shard", "plan a sharded save")]:
        figures = ("reads", "messages", "sent bytes", "seconds")
        answers = what == "load pretrained" or what.startswith("resume")
        for figure in (*figures, *(f"first: {name}" for name in figures if answers)):
            few, many = (results[str(size)][what][figure] for size in (RANKS[0], RANKS[-1]))
            verdict = "reached" if many <= LIMIT * max(few, 1e-9) else "MISSED"
            print(f"{what}, {figure} of a rank: {few:.4g} to {many:.4g}, at most {LIMIT} x: {verdict}", flush=True)
    return results


def model() -> nn.Module:
    """Return a transformer-like stack on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(BLOCKS)])


def planning(size: int) -> float:
    """Seconds to plan for as many ranks."""
    began = time.perf_counter()
    mmfsdp.plan(model(), {"wrap": {"kind": "size", "min_num_params": 100_000}}, size)
    return time.perf_counter() - began


def sharding(size: int) -> float:
    """Seconds of the first rank to shard, in a process of its own: a fake process group stands for the others."""
    code = f"from benchmarks.bench_ranks import shard_first; print(shard_first({size}))"
    root = Path(__file__).resolve().parents[1]
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
        for _ in range(sized(3, 1))
    ]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def shard_first(size: int) -> float:
    """Shard as the first of as many ranks, with all the others left out, and return the seconds that it took."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mmfsdp.collective import scopes

    class Echo:
        """Everybody else agrees."""

        def lowest(self, values: Sequence[int]) -> list[int]:
            return list(values)

        def broadcast(self, item: Any, origin: int) -> Any:
            return item

    scopes.new_scope = lambda _: Scope(Echo(), size, 0)  # type: ignore[arg-type]
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    mmfsdp.shard(model(), {"wrap": {"kind": "size", "min_num_params": 100_000}})  # what is imported on first use
    whole = model()
    began = time.perf_counter()
    mmfsdp.shard(whole, {"wrap": {"kind": "size", "min_num_params": 100_000}})
    return time.perf_counter() - began


def saving(scope: Scope, folder: str) -> None:
    """Save as ``local`` does: agree, write a small file of one's own, add the manifest, publish."""
    save = DirectorySave.begin(Path(folder, "saved"), scope, overwrite=False)

    def write(save: DirectorySave) -> dict[str, Any]:
        name = f"rank{save.rank}.pth"
        return {name: write_archive({"weight": torch.zeros(64)}, save.temporary / name)}

    save.finish(write, scope)


def loading(scope: Scope, path: Path) -> None:
    """Load this rank's rows of every tensor as `mmfsdp.load_checkpoint` does."""
    source, content = open_shared(path, scope)
    read_rows(source, content["state_dict"], scope)


def pretrained(scope: Scope, path: Path) -> None:
    """Load this rank's rows of every tensor as `mmfsdp.load_pretrained` does."""
    source, weights = open_weights(path, scope, rewrite=lambda layout: layout, change=lazy_tensors)
    read_rows(source, weights, scope)


def spread_ranks(size: int) -> list[int]:
    """Return the ranks that resume: the first, the last, and some between."""
    return sorted({0, size - 1, *range(0, size, max(size // PRESENT, 1))})


def write_local(path: Path, tensors: int, size: int, present: Sequence[int]) -> None:
    """Write a ``local`` checkpoint: the files of the ranks that read them, and links in place of all others."""
    names = [f"layers.{number}.weight" for number in range(tensors)]
    boxes = {"shape": [size, 4], "placements": [0], "replica": 0}
    header = {"format": "rank_local", "version": 1, "world_size": size, "save_id": SAVE, "mesh": [size]}

    def write(rank: int, file: Path) -> FileEntry:
        where = {f"state_dict/{name}": {**boxes, "offsets": [rank, 0]} for name in names}
        weights = {name: torch.randn(1, 4) for name in names}
        return write_archive({"state_dict": weights, "mmfsdp": {**header, "rank": rank, "tensors": where}}, file)

    write_files(path, "rank{}.pth", size, present, write)


def write_dcp(path: Path, tensors: int, size: int, present: Sequence[int]) -> None:
    """Write a DCP directory as `write_local` does; its ``.metadata``, which no rank needs, is empty."""
    names = [f"state_dict.layers.{number}.weight" for number in range(tensors)]

    def write(rank: int, to: Path) -> FileEntry:
        parts = {name: entry_in_memory(name, torch.randn(1, 4), (size, 4), ((rank, 0), (1, 4))) for name in names}
        file = plan_rank(dcp_items(parts, size), rank, SAVE)
        assert file is not None
        return write_file(to, file)

    path.mkdir()
    path.joinpath(".metadata").touch()
    write_files(path, FILE, size, present, write)


def dcp_items(parts: Mapping[str, TensorEntry], size: int) -> Items:
    """Return what a DCP directory of as many ranks holds: tensors whose rows they divide."""
    tensors = {name: (entry, EvenBoxes(entry.shape, (size,), (0,), 0)) for name, entry in parts.items()}
    return Items({name: tuple(name.split(".", 1)) for name in parts}, tensors, {}, size)


def planning_files(size: int) -> dict[str, float]:
    """Seconds to plan the DCP file of the last rank and, on the first, ``.metadata``; of a thousand tensors."""
    names = [f"state_dict.layers.{number}.weight" for number in range(RESUMED[-1])]
    rows = torch.zeros(1, 4)
    found = {}
    for what, rank in (("seconds", size - 1), ("first: seconds", 0)):
        parts = {name: entry_in_memory(name, rows, (size, 4), ((rank, 0), (1, 4))) for name in names}
        items = dcp_items(parts, size)
        began = time.perf_counter()
        plan_rank(items, rank, SAVE)
        if rank == 0:
            plan_metadata(items)
        found[what] = time.perf_counter() - began
    return found


def write_files(
    path: Path, name: str, size: int, present: Sequence[int], write: Callable[[int, Path], FileEntry]
) -> None:
    """Write the files of some ranks, link the last one in place of the others, and add the manifest."""
    path.mkdir(exist_ok=True)
    files = {name.format(rank): write(rank, path / name.format(rank)) for rank in present}
    last = name.format(present[-1])
    for other in {name.format(rank) for rank in range(size)} - files.keys():
        os.link(path / last, path / other)
        files[other] = files[last]
    write_manifest(path, save_id=SAVE, world_size=size, files=files)


def read_rows(source: Source, weights: Mapping[str, LazyTensor], scope: Scope) -> None:
    """Find and read this rank's rows of every tensor."""
    wanted = [(value, Box(*sharded_box(value.shape, [scope.size], [0], [scope.rank]))) for value in weights.values()]
    locate(wanted, scope)
    on_all_ranks(lambda: [value.read(box) for value, box in wanted], scope)
    on_all_ranks(source.check_unchanged, scope)


def described(works: list[Work]) -> dict[str, float]:
    """Return what the median rank did, and the first, which knows where everything lies."""
    others = works[1:]
    return {
        "reads": statistics.median(work.reads for work in others),
        "read bytes": statistics.median(work.read_bytes for work in others),
        "messages": statistics.median(work.messages for work in others),
        "sent bytes": statistics.median(work.sent_bytes for work in others),
        "seconds": statistics.median(work.seconds for work in others),
        "first: reads": works[0].reads,
        "first: messages": works[0].messages,
        "first: sent bytes": works[0].sent_bytes,
        "first: seconds": works[0].seconds,
    }


if __name__ == "__main__":
    main()
