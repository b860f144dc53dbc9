"""Damages checkpoints in the same ways and gives them to mmfsdp and to other tools: who notices, who does not.

``python -m benchmarks.damage_table --peers-python /path/to/venv/bin/python`` writes the tables of
docs/appendix/damage.md. The checkpoints are saved by torch itself on two ranks; those of the last column by
mmfsdp, with a manifest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.bench_convert import PEERS
from mmfsdp.checkpoint import convert, open_layout

__all__ = ["main"]

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "appendix" / "damage.md"
CLI = str(Path(sys.executable).with_name("mmfsdp-cli"))
NAMES = ["layers.0.weight", "layers.1.weight"]
SAFETENSORS_LOAD = (
    "import json, sys, torch; from pathlib import Path; from safetensors.torch import load_file; "
    "d = Path({source!r}); "
    "names = json.loads((d / 'model.safetensors.index.json').read_text())['weight_map'].values(); "
    "state = {{}}; [state.update(load_file(d / name)) for name in dict.fromkeys(names)]; torch.save(state, {target!r})"
)


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(512, 256, generator=generator) for name in NAMES}


def _rank(rank: int, folder: str, step: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{step}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    held = {
        name: DTensor.from_local(whole[256 * rank : 256 * rank + 256].clone(), mesh, [Shard(0)])
        for name, whole in weights(step).items()
    }
    dcp.save({"model": held}, checkpoint_id=f"{folder}/dcp{step}")
    dcp.save(held, storage_writer=HuggingFaceStorageWriter(path=f"{folder}/hf{step}", save_distributed=True))
    dist.barrier()
    dist.destroy_process_group()


def save(folder: Path, step: int) -> None:
    """Write the same step in every layout."""
    mp.spawn(_rank, (str(folder), step), 2)
    torch.save({}, folder / f"dcp{step}" / "meta.pt")  # what Lightning looks for
    shards = folder / f"shards{step}"
    shards.mkdir()
    files = [f"model-{index + 1:05d}-of-00002.safetensors" for index in range(2)]
    for name, file in zip(NAMES, files, strict=True):
        save_file({name: weights(step)[name]}, shards / file)
    text = json.dumps({"metadata": {}, "weight_map": dict(zip(NAMES, files, strict=True))})
    (shards / "model.safetensors.index.json").write_text(text)
    torch.save({"state_dict": weights(step)}, folder / "whole.pth")
    convert(folder / "whole.pth", folder / f"ours{step}", to="dcp", ranks=2, overwrite=True)
    convert(folder / "whole.pth", folder / f"our_shards{step}", max_shard_size="600kB", overwrite=True)


def shards(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in (".distcp", ".safetensors"))


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 0x40
    file.write_bytes(raw)


def flip_data(path: Path, _: Path) -> None:
    chunk = next(iter(open_layout(path).tensors.values())).chunks()[0]
    flip(chunk.file, chunk.offset + 4 * 1000 + 3)


def flip_header(path: Path, _: Path) -> None:
    # In the description of the first tensor: the record's own header, or the offsets in the header of safetensors.
    file = shards(path)[0]
    raw = file.read_bytes()
    flip(file, raw.index(b"PK\x01\x02") + 42 if file.suffix == ".distcp" else raw.index(b"data_offsets") + 16)


def flip_metadata(path: Path, _: Path) -> None:
    file = path / (".metadata" if (path / ".metadata").exists() else "model.safetensors.index.json")
    raw = file.read_bytes()
    flip(file, raw.index(b"layers.0.weight") + 7)


def half(path: Path, _: Path) -> None:
    file = shards(path)[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def delete(path: Path, _: Path) -> None:
    shards(path)[-1].unlink()


def swap(path: Path, _: Path) -> None:
    one, two = shards(path)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def double(path: Path, _: Path) -> None:
    one, two = shards(path)
    two.write_bytes(one.read_bytes())


def stale(path: Path, other: Path) -> None:
    two = shards(path)[1]
    two.write_bytes((other / two.name).read_bytes())


def gap(path: Path, _: Path) -> None:
    """Take a chunk out of the metadata, as a save that lost one would leave it."""
    content = pickle.loads((path / ".metadata").read_bytes())
    name = next(name for name in content.state_dict_metadata if name.endswith(NAMES[0]))
    content.state_dict_metadata[name].chunks.pop()
    (path / ".metadata").write_bytes(pickle.dumps(content))


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import pathlib; pathlib.Path('code_was_run').touch()",)


def code(path: Path, _: Path) -> None:
    content = pickle.loads((path / ".metadata").read_bytes())
    content.planner_data["__code"] = _Code()
    (path / ".metadata").write_bytes(pickle.dumps(content))


CASES: Mapping[str, Callable[[Path, Path], None]] = {
    "nothing": lambda path, other: None,
    "a byte flipped in a tensor's data": flip_data,
    "a byte flipped in a header within a shard": flip_header,
    "a byte flipped in a name in the metadata or index": flip_metadata,
    "a shard cut in half": half,
    "a shard deleted": delete,
    "two shards swapped": swap,
    "a shard twice, in place of another": double,
    "a shard of another step, of the same size": stale,
    "a chunk missing in the metadata": gap,
    "metadata that runs code": code,
}


def tensors_in(target: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(target.iterdir()) if target.is_dir() else [target]:
        if file.suffix == ".safetensors":
            found |= load_file(file)
        elif file.suffix in (".pt", ".pth", ".ckpt", ".bin"):
            _collect(torch.load(file, weights_only=True), "", found)
    return found


def _collect(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, below in value.items():
            _collect(below, f"{name}.{key}".lstrip("."), found)


def outcome(words: list[str], target: Path, folder: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False)
    if (folder / "code_was_run").exists():
        (folder / "code_was_run").unlink()
        return "**code was run**"
    if done.returncode:
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:]
        said = last[0] if last else f"exit code {done.returncode}"
        named = any(
            part in done.stderr.split("Traceback")[0] + said
            for part in (".distcp", ".safetensors", ".metadata", *NAMES)
        )
        return "found" if named else f"crash: `{said.partition(':')[0].rpartition('.')[2]}`"
    try:
        found = tensors_in(target)
    except Exception as error:  # what was written cannot be read
        return f"**unreadable output, exit 0** ({type(error).__name__})"
    for name, expected in weights(0).items():
        held = next((tensor for key, tensor in found.items() if key.endswith(name)), None)
        if held is None or held.shape != expected.shape or not torch.equal(held, expected):
            return "**wrong output, exit 0**" if held is not None else "**tensor lost, exit 0**"
    return "right output"


def table(folder: Path, columns: Mapping[str, tuple[str, str, Callable[[Path, Path], list[str]]]]) -> str:
    """Return a table: a row for each kind of damage, a column for each tool with its kind of checkpoint."""
    lines = ["| damage | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for case, damage in CASES.items():
        cells = []
        for source, suffix, command in columns.values():
            path, target = folder / "work" / "in", folder / "work" / f"out{suffix}"
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            shutil.copytree(folder / f"{source}0", path)
            metadata = [name for name in (".metadata", "model.safetensors.index.json") if (path / name).exists()]
            if damage in (flip_metadata, gap, code) and (
                not metadata or (damage != flip_metadata and source not in ("dcp", "ours"))
            ):
                cells.append("")
                continue
            if not suffix:
                target.mkdir()
            damage(path, folder / f"{source}1")
            cells.append(outcome(command(path, target), target, path.parent))
            print(f"{case}: {source}: {cells[-1]}", file=sys.stderr)
        if any(cells):
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ours(path: Path, target: Path) -> list[str]:
    return [CLI, "convert", str(path), str(target), "--no-fsync"]


def main() -> None:
    """Run all cases and write the tables between the marks of the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--tables", nargs="+", default=["directories", "files"], choices=["directories", "files"])
    options = parser.parse_args()
    python = options.peers_python

    def peer(code_of: str) -> Callable[[Path, Path], list[str]]:
        return lambda path, target: [python, "-c", code_of.format(source=str(path), target=str(target))]

    versions = "import importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in ('torch', 'accelerate', "
    versions += "'lightning', 'safetensors')))"
    said = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in range(2):
            save(folder, step)
        directories = {
            "accelerate merge-weights": ("dcp", "", peer(PEERS["accelerate merge-weights"])),
            "torch dcp_to_torch_save": ("dcp", ".pt", peer(PEERS["torch dcp_to_torch_save"])),
            "Lightning consolidate": ("dcp", ".ckpt", peer(PEERS["Lightning consolidate"])),
            "mmfsdp": ("dcp", ".pth", ours),
            "mmfsdp, saved by mmfsdp": ("ours", ".pth", ours),
        }
        files = {
            "torch HF consolidate": ("hf", "", peer(PEERS["torch HF consolidate"])),
            "mmfsdp, the same files": ("hf", ".safetensors", ours),
            "safetensors load_file": ("shards", ".pt", peer(SAFETENSORS_LOAD)),
            "mmfsdp, the same files as that": ("shards", ".pth", ours),
            "mmfsdp, saved by mmfsdp": ("our_shards", ".pth", ours),
        }
        text = DOCUMENT.read_text(encoding="utf-8")
        for mark, columns in (("directories", directories), ("files", files)):
            if mark in options.tables:
                head, _, rest = text.partition(f"<!-- {mark} -->")
                _, _, tail = rest.partition(f"<!-- end of {mark} -->")
                body = f"Run on {datetime.datetime.now().date().isoformat()} with {said}.\n\n{table(folder, columns)}"
                text = f"{head}<!-- {mark} -->\n\n{body}\n<!-- end of {mark} -->{tail}"
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
