"""Workflows, forms and the citation follow the repository: releases of torch, sessions of nox, the version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tools.address import FILES as ADDRESSED
from tools.address import state_address

from mmfsdp.basics.installing import REPOSITORY

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github"
FILES = sorted(FOLDER.rglob("*.yml"))
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
NOXFILE = (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_is_yaml(path: Path) -> None:
    needs = {"dependabot": "version", "config": "blank_issues_enabled"}.get(path.stem, "name")
    assert needs in yaml.safe_load(path.read_text())


def test_the_matrix_has_every_supported_release() -> None:
    workflow = yaml.safe_load((FOLDER / "workflows/ci.yml").read_text())
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
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert "vars.MMFSDP_" in job.get("if", "") or "needs" in job, path


def test_actions_are_pinned_by_commit() -> None:
    lines = [line for path in WORKFLOWS for line in path.read_text().splitlines() if re.match(r"\s*-? *uses:", line)]
    pins = [re.fullmatch(r"\s*(?:- )?uses: ([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line) for line in lines]
    assert [line for line, pin in zip(lines, pins, strict=True) if pin is None] == []
    found = {pin.groups() for pin in pins if pin is not None}
    assert len(found) == len({action for action, _, _ in found}), "an action has two versions"
    assert len(found) > 5


def test_jobs_may_do_no_more_than_they_say() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path


def test_dependabot_sees_all_requirements() -> None:
    updates = yaml.safe_load((FOLDER / "dependabot.yml").read_text())["updates"]
    seen = {folder for update in updates for folder in update.get("directories", [])}
    assert {f"/{path.parent.relative_to(ROOT)}" for path in ROOT.glob("packages/*/pyproject.toml")} | {"/"} == seen


def test_pages_of_all_versions_are_kept(tmp_path: Path) -> None:
    """The workflow's script, with a repository on this disk in the place of the server's."""
    steps = yaml.safe_load((FOLDER / "workflows/docs.yml").read_text())["jobs"]["build"]["steps"]
    script = next(step["run"] for step in steps if "gh-pages" in step.get("run", ""))
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q", "--bare", tmp_path / "server"], check=True)
    for version in ("latest", "v0.9.0", "v0.10.0", "v1.0.0rc1", "latest"):
        clone = tmp_path / "clone"
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run([*git, "clone", "-q", tmp_path / "server", clone], check=True, stderr=subprocess.DEVNULL)
        (clone / "file").write_text("of main")
        subprocess.run([*git, "add", "file"], cwd=clone, check=True)
        subprocess.run([*git, "commit", "-q", "-m", "A commit"], cwd=clone, check=True)
        shutil.copytree(ROOT / "tools", clone / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        built = clone / "docs" / "_build" / "html"
        built.mkdir(parents=True)
        (built / "index.html").write_text(version)
        (built / "llms.txt").write_text("- [A page](_sources/page.md.txt): about it\n")
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        environ["VERSION"] = version
        done = subprocess.run(words, cwd=clone, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    subprocess.run([*git, "clone", "-q", "-b", "gh-pages", tmp_path / "server", tmp_path / "site"], check=True)
    site = tmp_path / "site"
    assert yaml.safe_load((site / "versions.json").read_text()) == ["latest", "v1.0.0rc1", "v0.10.0", "v0.9.0"]
    assert not (site / "file").exists()
    assert (site / "v0.9.0" / "index.html").read_text() == "v0.9.0"
    assert 'url=v0.10.0/"' in (site / "index.html").read_text()
    assert "](v0.10.0/_sources/page.md.txt)" in (site / "llms.txt").read_text()
    log = subprocess.run([*git, "log", "--format=%s"], cwd=site, capture_output=True, text=True, check=True).stdout
    assert log.splitlines() == [f"Pages of {name}" for name in ("v1.0.0rc1", "v0.10.0", "v0.9.0", "latest")]


def test_the_citation_has_the_version() -> None:
    project = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["authors"] == project["authors"]


@pytest.mark.parametrize("path", ADDRESSED, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_state_the_address(path: Path) -> None:
    text, address = path.read_text(encoding="utf-8"), "https://github.com/somebody/mmfsdp"
    assert state_address(path, REPOSITORY) == text, "run: python tools/address.py"
    stated = state_address(path, address)
    if path.suffix == ".toml":
        urls = tomllib.loads(stated)["project"]["urls"]
        assert urls["Repository"] == address
        assert all(url.startswith(address) for url in urls.values())
    else:
        assert address in str(yaml.safe_load(stated))
