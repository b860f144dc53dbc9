"""Checks wheels and sdists before a release: versions, metadata, the files in them, and licences.

    python tools/release.py dist          # `nox -s release` runs this
    python tools/release.py dist 0.1.0    # for a tag: CHANGELOG.md must say when this version was released

It prints what is in the files, and ends with one line for each thing that is wrong.
"""

from __future__ import annotations

import email.parser
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.metadata import Metadata
from tools.links import broken_in_markdown

__all__ = ["check", "files_in", "notices_in", "wrong_metadata"]

ROOT = Path(__file__).parents[1]
LICENSE = "Apache-2.0"

OF_OTHERS: dict[str, str] = {}
"""Files that others wrote, by their path in a wheel or an sdist: the SPDX expression of their licence."""

NOTICE = re.compile(rb"(?i)copyright (?:\(c\)|\xc2\xa9|\d{4})|SPDX-License-Id|licensed under|all rights reserved")


def check(folder: Path, tag: str | None = None) -> Iterator[str]:
    """Yield a sentence for each thing that keeps the files in a folder from being released.

    Args:
        folder: The folder with three wheels and three sdists, and nothing else of mmfsdp.
        tag: The version of the tag, such as ``0.1.0``, if there is one.
    """
    projects = {
        path.parent: tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
    }
    version = next(iter(projects.values()))["version"]
    yield from _wrong_versions(version, tag)
    expected = set()
    for package, project in projects.items():
        base = f"{project['name'].replace('-', '_')}-{version}"
        for path in (folder / f"{base}-py3-none-any.whl", folder / f"{base}.tar.gz"):
            expected.add(path)
            if not path.exists():
                yield f"{path.name} is missing"
                continue
            files = files_in(path)
            print(f"{path.name}: {len(files)} files, {path.stat().st_size / 1e3:.0f} kB")
            yield from (f"{path.name}: {line}" for line in wrong_metadata(files, project))
            yield from (f"{path.name}: {line}" for line in _wrong_files(files, package, path.suffix == ".whl"))
            yield from (f"{path.name}: {line}" for line in notices_in(files))
        yield from broken_in_markdown(package / "README.md")
        if links := re.findall(r"\]\((?!https?://)[^)]*\)", (package / "README.md").read_text()):
            yield f"{package.name}/README.md: an index shows it, where these lead nowhere: {', '.join(links)}"
    for path in {*folder.glob("mmfsdp*")} - expected:
        yield f"{path.name} does not belong to version {version}"


def files_in(path: Path) -> dict[str, bytes]:
    """Return the files in a wheel or an sdist by their paths, without the folder that an sdist has around them."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as sdist:
        members = [member for member in sdist.getmembers() if not member.isdir()]
        return {member.name.partition("/")[2]: sdist.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def wrong_metadata(files: Mapping[str, bytes], project: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with the metadata of a wheel or an sdist, by the rules of PyPI and by the project's own.

    Args:
        files: What is in it.
        project: The table ``project`` of its pyproject.toml.
    """
    name = next(name for name in files if re.fullmatch(r"PKG-INFO|[^/]*\.dist-info/METADATA", name))
    try:
        found = Metadata.from_email(files[name], validate=True)
    except ExceptionGroup as errors:
        yield from map(str, errors.exceptions)
        return
    if (found.name, str(found.version)) != (project["name"], project["version"]):
        yield f"says that it is {found.name} {found.version}"
    if found.license_expression != LICENSE or found.license_files != ["LICENSE"]:
        yield f"has the licence {found.license_expression} in {found.license_files}, not {LICENSE} in LICENSE"
    if not any(key.endswith("LICENSE") for key in files):
        yield "does not contain LICENSE"
    if email.parser.BytesParser().parsebytes(files[name])["Description-Content-Type"] != "text/markdown":
        yield "does not say that its description is Markdown"


def notices_in(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield each file with a notice of somebody's copyright or licence that `OF_OTHERS` does not list."""
    for name, content in files.items():
        ours = name in OF_OTHERS or re.search(r"(?:^|/)(LICENSE|METADATA|PKG-INFO)$", name)
        if not ours and (found := NOTICE.search(content)):
            yield f"{name}: has the notice {found[0].decode()!r}. Who wrote it? OF_OTHERS lists files of others"


def _wrong_versions(version: str, tag: str | None) -> Iterator[str]:
    citation, changes = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    if f"\nversion: {version}\n" not in citation:
        yield f"CITATION.cff does not have version {version}"
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)$", changes, re.MULTILINE)
    if heading is None:
        yield f"CHANGELOG.md has no heading `## {version} (...)`"
    if tag is not None and tag != version:
        yield f"the tag is {tag}, and the packages have version {version}"
    if tag is not None and heading is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        yield f"CHANGELOG.md does not say when {version} was released, but ({heading[1]})"


def _wrong_files(files: Mapping[str, bytes], package: Path, is_wheel: bool) -> Iterator[str]:
    """Yield files that are too many or too few: those that git knows are what was reviewed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {ROOT / name for name in listed.split("\0")}
    sources = {path for path in tracked if path.is_relative_to(package)}
    if is_wheel:
        expected = {str(path.relative_to(package / "src")) for path in sources if path.is_relative_to(package / "src")}
        found = {name for name in files if ".dist-info/" not in name}
    else:
        tests = {"core": "core", "mmengine_adapter": "mmengine_adapter", "cli": "cli"}[package.name]
        inside = {path for path in tracked if path.is_relative_to(ROOT / "tests" / tests)}
        shared = re.compile(r"(?:tests|tools)/\w+\.py|pytest\.ini|constraints\.txt")
        common = {ROOT / name for name in files if shared.fullmatch(name)} & tracked
        expected = {str(path.relative_to(package)) for path in sources}
        expected |= {str(path.relative_to(ROOT)) for path in inside | common}
        found = {*files} - {"PKG-INFO", ".gitignore"}
    yield from (f"{name}: is not in it" for name in sorted(expected - found))
    yield from (f"{name}: git does not know it" for name in sorted(found - expected))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("Give the folder with the wheels and sdists and, for a tag, its version.")
    sys.exit("\n".join(check(Path(sys.argv[1]), *sys.argv[2:])) or None)
