"""The script that installs torch without CUDA's libraries: what it leaves out, and what it compiles in their place."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "torch_on_cpu.py"
spec = importlib.util.spec_from_file_location("torch_on_cpu", SCRIPT)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

METADATA = """\
Name: torch
Requires-Dist: filelock
Requires-Dist: typing-extensions>=4.13.0
Requires-Dist: cuda-toolkit[cublas]==13.2.2; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.30.7; platform_system == "Linux"
Requires-Dist: triton~=3.9.0; platform_system == "Linux"
Requires-Dist: optree>=0.13.0; extra == "optree"

Requires-Dist: nvidia-nothing is a line of the description
"""


def test_packages_of_cuda_are_left_out() -> None:
    kept, required = tool.without_cuda(METADATA)
    assert required == ["filelock", "typing-extensions>=4.13.0"]
    assert kept.splitlines() == [METADATA.splitlines()[place] for place in (0, 1, 2, 6, 7, 8)]


@pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("readelf")), reason="compiles libraries: needs gcc and readelf"
)
def test_missing_libraries_are_made(tmp_path: Path) -> None:
    def compile(name: str, code: str, *options: str) -> None:
        (tmp_path / "code.c").write_text(code)
        words = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / "code.c"), *options]
        subprocess.run(words, check=True)

    folder = tmp_path / "lib"
    folder.mkdir()
    (tmp_path / "versions").write_text("libcudart.so.13 { global: cudaGetDeviceCount; cudaGetErrorString; };\n")
    script = f"-Wl,--version-script={tmp_path / 'versions'}"
    cudart = "int cudaGetDeviceCount(void) { return 0; } const char *cudaGetErrorString(int code) { return 0; }"
    compile("libcudart.so.13", cudart, "-Wl,-soname,libcudart.so.13", script)
    compile("libnccl.so.2", "int ncclGetVersion(void) { return 0; }", "-Wl,-soname,libnccl.so.2")
    code = "int cudaGetDeviceCount(void); int ncclGetVersion(void); const char *cudaGetErrorString(int);\n"
    code += "int total(void) { return cudaGetDeviceCount() + ncclGetVersion() + (cudaGetErrorString(1)[0] == 'n'); }"
    linked = [str(tmp_path / name) for name in ("libcudart.so.13", "libnccl.so.2")]
    compile("lib/libtorch.so", code, *linked, "-Wl,-rpath,$ORIGIN")
    # In a process of its own: torch for CUDA has loaded libraries of these names here.
    load = [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(folder / 'libtorch.so')!r}).total())"]
    failed = subprocess.run(load, capture_output=True, text=True, check=False)
    assert re.search(r"OSError: (libcudart|libnccl)", failed.stderr), failed
    tool.stand_in_for_missing(folder)
    assert {path.name for path in folder.iterdir()} == {"libtorch.so", "libcudart.so.13", "libnccl.so.2"}
    assert int(subprocess.run(load, capture_output=True, text=True, check=True).stdout) == 2 * tool.NO_DEVICE + 1
