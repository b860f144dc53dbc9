"""Whatever the bytes, reading a checkpoint ends soon, in little memory, and with an error of ours or none.

``MMFSDP_FUZZ=20000`` tries so many examples instead of the few of a normal run.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.mutations import mutate, mutations, repaired
from tests.core.samples import write_samples

from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import MmfsdpError

EXAMPLES = int(os.environ.get("MMFSDP_FUZZ", "0"))
KINDS = ["zip.pth", "legacy.pth", "plain.safetensors", "ours.safetensors", "ours.pth", "index", "local", "dcp"]
KINDS += ["torch_dcp", "dcp_safetensors", "bins", "safetensors_ranks", "stock"]
MEMORY = 1 << 30  # bytes on top of what this process has: stacks of threads, and room for what is refused
SECONDS = 5.0  # of the processor: others may keep it busy


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"))


@contextmanager
def bounded() -> Iterator[None]:
    """Allow little memory and little time."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    faulthandler.dump_traceback_later(60, exit=True)  # even where no signal is heard
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < SECONDS
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except MmfsdpError:
        return None


def read_every_way(path: Path, good: Path, out: Path) -> None:
    for leftover in out.parent.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    with bounded():
        if attempt(open_layout, path) is None:
            attempt(open_layout, path, trust=True)
        attempt(verify, path)
        attempt(convert, path, out.with_suffix(".pth"), keep="all", fsync=False, jobs=1)
        attempt(convert, path, out.with_suffix(".safetensors"), verify=False, trust=True, fsync=False, jobs=1)
        attempt(convert, path, out, to="dcp", fsync=False, jobs=1)
        attempt(diff, path, good)


@pytest.mark.sample("ours.pth", "ours.safetensors", "dcp", "legacy.pth")
@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes(samples: dict[str, Path], tmp_path: Path, kind: str) -> None:
    good = samples[kind]
    files = sorted(path for path in ([good] if good.is_file() else good.iterdir()))
    others = [path.read_bytes() for name in KINDS for path in [samples[name]] if path.is_file()]
    out = tmp_path / "out" / "target"
    out.parent.mkdir()

    # Metadata is where the decisions are: the same file several times, to be chosen more often.
    weighted = files + [path for path in files if path.suffix in ("", ".json")] * 3

    @settings(
        max_examples=EXAMPLES or 25,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(weighted),
        mutations(),
        st.sampled_from(["repair", "repair", "raw"]),
        st.sampled_from(others),
        st.booleans(),
        st.sampled_from(files),
    )
    def run(file: Path, changes: Any, how: str, other: bytes, unlisted: bool, copied: Path) -> None:
        path = tmp_path / good.name
        if path.is_dir():
            shutil.rmtree(path)
        if good.is_dir():
            shutil.copytree(good, path)
        else:
            shutil.copy(good, path)
        victim = path / file.name if good.is_dir() else path
        data = repaired(victim, changes, other) if how == "repair" else None
        victim.write_bytes(mutate(victim.read_bytes(), changes, copied.read_bytes()) if data is None else data)
        if unlisted and good.is_dir() and (path / "manifest.json").exists():
            (path / "manifest.json").unlink()  # which would have told
        read_every_way(path, good, out)

    run()
