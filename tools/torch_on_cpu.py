"""Installs a release of torch that runs on a machine without CUDA, into the environment that runs this script.

    python tools/torch_on_cpu.py 2.15.0

The official index of CPU builds is tried first. Where it cannot be reached, the CUDA build is installed from pip's own
index, without the several gigabytes of NVIDIA libraries that it links. Libraries take their place that have the same
names and functions, but each of these functions only returns an error code, or the text of one. torch then finds no
device and computes on the CPU. That needs gcc and readelf. ``torch.version.cuda`` is None, as in a CPU build: otherwise
torch says that triton is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["install", "stand_in_for_missing"]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NO_DEVICE = 100  # cudaErrorNoDevice
OF_CUDA = re.compile(r"(nvidia|cuda|triton|pytorch-triton)\b")
"""Names of the packages that a CUDA build requires beside those that it imports."""
UNVERSIONED = re.compile(r"(cu|nccl|nv|__nv)[A-Za-z]\w*$")
"""Functions of those NVIDIA libraries that do not version their symbols."""
OF_TEXT = re.compile(r"(?!cuGet)\w+Error(String|Name)$")
"""Functions that return a text, which torch reads when a function returned an error code."""
OF_SYSTEM = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s|gomp|gfortran|quadmath|z)[.-])")


def install(release: str) -> None:
    """Install ``torch==release`` and what it imports."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    official = [*pip, f"torch=={release}", "--index-url", CPU_INDEX, "--retries=0", "--timeout=15"]
    if subprocess.run(official, check=False, stderr=subprocess.DEVNULL).returncode == 0:
        return
    print(f"{CPU_INDEX} does not give torch {release}: installing the CUDA build, without CUDA's libraries.")
    subprocess.run([*pip, "--no-deps", f"torch=={release}"], check=True)
    site = Path(sysconfig.get_path("platlib"))
    metadata = site / f"torch-{release}.dist-info/METADATA"
    kept, required = without_cuda(metadata.read_text())
    metadata.write_text(kept)  # otherwise, pip installs CUDA's packages with the next package that requires torch
    subprocess.run([*pip, *required], check=True)
    stand_in_for_missing(site / "torch/lib")
    with open(site / "torch/version.py", "a") as versions:
        versions.write("cuda = None\n")


def without_cuda(metadata: str) -> tuple[str, list[str]]:
    """Return a wheel's metadata without CUDA's packages, and the packages that it still requires."""
    kept, required = [], []
    header, separator, description = metadata.partition("\n\n")
    for line in header.splitlines():
        name, _, value = line.partition(": ")
        if name == "Requires-Dist" and "extra ==" not in value:
            if OF_CUDA.match(value):
                continue
            required.append(value)
        kept.append(line)
    return "\n".join(kept) + separator + description, required


def stand_in_for_missing(folder: Path) -> None:
    """Compile a library for each one that the libraries in ``folder`` link and that is neither there nor the system's.

    Args:
        folder: The folder of torch's own libraries, where the new ones are written.
    """
    linked: set[str] = set()
    functions: dict[str, dict[str, set[str]]] = {}  # by library and version
    defined: set[str] = set()
    unversioned: set[str] = set()
    here = [path for path in folder.iterdir() if ".so" in path.name]
    for path in here:
        linked |= {*re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", path))}
        # Which library a version of a symbol comes from: "File: libcudart.so.12", then "Name: libcudart.so.12".
        origin, library = dict[str, str](), ""
        for kind, name in re.findall(r"(File|Name): (\S+)", readelf("--version-info", path)):
            if kind == "File":
                library = name
            else:
                origin[name] = library
        for line in readelf("--dyn-syms", path).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[1].isalnum():
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] != "UND":
                defined.add(name)
            elif version := version.strip("@"):
                functions.setdefault(origin.get(version, ""), {}).setdefault(version, set()).add(name)
            elif UNVERSIONED.match(name):
                unversioned.add(name)
    missing = sorted(linked - {path.name for path in here})
    missing = [name for name in missing if not OF_SYSTEM.match(name)]
    for place, name in enumerate(missing):
        loose = unversioned - defined if place == 0 else set[str]()  # one library answers for all
        compile_library(folder / name, functions.get(name, {}), loose)
    print(f"Compiled {len(missing)} libraries that stand in for CUDA's: {', '.join(missing)}")


def readelf(table: str, path: Path) -> str:
    """Return a table of a library as text."""
    words = ["readelf", "--wide", table, str(path)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def compile_library(path: Path, versions: dict[str, set[str]], loose: set[str]) -> None:
    """Compile a library whose functions all return `NO_DEVICE`, or a text.

    Args:
        path: The library.
        versions: Names of functions by the version that they are linked with.
        loose: Names of functions without a version.
    """
    names = sorted(loose.union(*versions.values()))
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "library.c"), Path(work, "versions.map")
        source.write_text("".join(map(function, names)) or "int empty;\n")
        words = ["gcc", "-w", "-fno-builtin", "-nostdlib", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
        if versions:
            script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(n))}; }};\n" for v, n in versions.items()))
            words.append(f"-Wl,--version-script={script}")
        subprocess.run([*words, "-o", str(path), str(source)], check=True)


def function(name: str) -> str:
    """Return the C code of a function."""
    if OF_TEXT.match(name):
        return f'const char *{name}(void) {{ return "no device"; }}\n'
    return f"long {name}(void) {{ return {NO_DEVICE}; }}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give a release of torch, such as 2.15.0.")
    install(sys.argv[1])
