"""Workflows, forms and the citation follow the repository: releases of torch, sessions of nox, the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
NOXFILE = (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_is_yaml(path: Path) -> None:
    assert {*yaml.safe_load(path.read_text())} >= {"name"}


def test_the_matrix_has_every_supported_release() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    releases = re.search(r"^RELEASES = \((.*)\)", NOXFILE, re.MULTILINE)
    assert pinned is not None
    assert releases is not None
    tested = {row["torch"] for row in workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]}
    assert tested == {*re.findall(r'"([\d.]+)"', releases[1]), pinned[1]}


def test_sessions_exist() -> None:
    sessions = {*re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", NOXFILE, re.MULTILINE)}
    for path in FILES:
        for words in re.findall(r"nox -s ([\w ]+)", path.read_text()):
            assert {*words.split()} <= sessions, path


def test_nothing_runs_before_it_is_switched_on() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert "vars.MMFSDP_" in job.get("if", "") or "needs" in job, path


def test_the_citation_has_the_version() -> None:
    project = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["authors"] == project["authors"]
