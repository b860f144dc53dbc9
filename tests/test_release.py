"""What a release has: links that lead somewhere, generated pages, metadata, licences, public names as promised."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from tests.conftest import NEEDED
from tests.core.ours.make import HERE as EARLIER
from tests.core.test_public_api import SUBPACKAGES as COMPARED
from tests.doc_pages import ROOT
from tests.test_architecture import LEVELS
from tools import compatibility
from tools.links import broken_in_markdown, broken_in_site, markdown_files
from tools.llms_txt import llms_txt
from tools.release import notices_in, wrong_metadata

import mmfsdp
from mmfsdp.basics.torch_version import MINIMUM_TORCH, NEWEST_TESTED_TORCH


def test_links_in_markdown_lead_somewhere() -> None:
    assert [line for path in markdown_files() for line in broken_in_markdown(path)] == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<p id="top"><a href="a.html#here">A</a><img src="no.png"><a href="#no">')
    (tmp_path / "a.html").write_text(
        '<h1 id="there"><a href="https://example.org/no">B</a> <a href="index.html#top">C</a>'
    )
    (tmp_path / "alone.html").write_text("")
    assert broken_in_site(tmp_path) == [
        "alone.html: no link leads there",
        "index.html: #no: there is no such heading",
        "index.html: a.html#here: there is no such heading",
        "index.html: no.png: there is no such file",
    ]


def test_the_page_on_compatibility_is_up_to_date() -> None:
    text = compatibility.PAGE.read_text(encoding="utf-8")
    assert text == compatibility.page(), "run: python tools/compatibility.py"
    released = re.findall(r"^\| (2\.\d+)\.\d+ \| 20", text, re.MULTILINE)
    numbers = [tuple(map(int, release.split("."))) for release in released]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (MINIMUM_TORCH, NEWEST_TESTED_TORCH)


def test_programs_get_a_list_of_all_pages() -> None:
    lines = llms_txt(ROOT / "docs").splitlines()
    assert lines[0] == "# mmfsdp"
    assert lines[2].startswith("> ")
    entries = [line for line in lines[3:] if line and not line.startswith("## ")]
    pages = [re.fullmatch(r"- \[[^\]]+\]\(_sources/(.+)\.txt\): (.{20,})", line) for line in entries]
    assert [line for line, page in zip(entries, pages, strict=True) if page is None] == []
    names = [page[1] for page in pages if page is not None]
    listed = re.findall(r"^(?!:)([\w/]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert names == [f"{name}.md" for name in listed]
    assert all((ROOT / "docs" / name).exists() for name in names)


def test_the_changelog_is_for_users() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 900


def metadata(**changes: str) -> dict[str, bytes]:
    fields = {
        "Metadata-Version": "2.4",
        "Name": "mmfsdp",
        "Version": "0.1.0",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    text = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return {"PKG-INFO": f"{text}\nA description\n".encode(), "LICENSE": b""}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, r"$"),
        ({"Version": "0.2.0"}, r"says that it is mmfsdp 0\.2\.0"),
        ({"License_Expression": "MIT"}, r"has the licence MIT in \['LICENSE'\], not Apache-2\.0"),
        ({"Description_Content_Type": "text/plain"}, r"does not say that its description is Markdown"),
        ({"Requires_Dist": "torch>>2"}, r".*'torch>>2' is invalid for 'requires-dist'"),
    ],
)
def test_wrong_metadata_is_found(changes: dict[str, str], expected: str) -> None:
    found = "\n".join(wrong_metadata(metadata(**changes), {"name": "mmfsdp", "version": "0.1.0"}))
    assert re.match(expected, found), found


def test_files_of_others_are_found() -> None:
    files = {"a.py": b"# Copyright (c) Somebody", "LICENSE": b"Copyright 2026", "b.py": b"SPDX-License-Identifier: MIT"}
    assert [line.partition(":")[0] for line in notices_in(files)] == ["a.py", "b.py"]


@pytest.mark.parametrize("package", ["core", "mmengine_adapter", "cli"])
def test_sdists_have_what_their_tests_import(package: str) -> None:
    """Files of tests that need more are left out by conftest.py; those that they share must not need more."""
    build = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = [Path(target) for target in build["targets"]["sdist"]["force-include"].values()]
    assert all((ROOT / path).exists() for path in included)
    shared = [path for path in (ROOT / "tests" / package).rglob("*.py") if not path.name.startswith("test_")]
    shared += [ROOT / path for path in included if path.suffix == ".py" and path.name != "conftest.py"]
    missing = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in shared
        for module, _ in NEEDED.findall(path.read_text())
        if module and not any(Path(module.replace(".", "/")).is_relative_to(item.with_suffix("")) for item in included)
    ]
    assert missing == []


def test_later_releases_will_read_checkpoints_of_this_one() -> None:
    assert (EARLIER / mmfsdp.__version__).exists(), "run: python tests/core/ours/make.py"


SUBPACKAGES = ["mmfsdp", *(f"mmfsdp.{name}" for level in LEVELS for name in level)]


def test_no_public_name_changes_by_accident() -> None:
    assert {*COMPARED} == {*SUBPACKAGES}


def test_the_policy_names_what_is_experimental() -> None:
    modules = [*SUBPACKAGES, "mmfsdp_mmengine"]
    marked = {
        name
        for module in map(importlib.import_module, modules)
        for name in module.__all__
        if (inspect.getdoc(getattr(module, name)) or "").startswith("Experimental:")
    }
    text = (ROOT / "docs/reference/stability.md").read_text(encoding="utf-8")
    section = text.partition("## Experimental\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"^- `(\w+)`", section, re.MULTILINE)} == marked
