"""Holds what DESIGN says about the repository itself: import direction, equal versions, one way to set up and test."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmfsdp.basics.torch_version import MINIMUM_TORCH

ROOT = Path(__file__).parent.parent
SOURCES = {
    "mmfsdp": ROOT / "packages/core/src/mmfsdp",
    "mmfsdp_mmengine": ROOT / "packages/mmengine_adapter/src/mmfsdp_mmengine",
    "mmfsdp_cli": ROOT / "packages/cli/src/mmfsdp_cli",
}
PROJECTS = sorted((ROOT / "packages").glob("*/pyproject.toml"))

# The half of core that must work without torch.
TORCH_FREE = ("__init__.py", "errors.py", "basics", "config", "checkpoint")

# What each part of the torch-free half may import of core, at any level of nesting.
GROUND = ("mmfsdp.errors", "mmfsdp.basics.dtypes", "mmfsdp.basics.references", "mmfsdp.basics.text")
MAY_IMPORT = {
    "mmfsdp.errors": (),
    "mmfsdp.basics.dtypes": ("mmfsdp.errors",),
    "mmfsdp.basics.references": ("mmfsdp.errors",),
    "mmfsdp.basics.text": ("mmfsdp.errors",),
    "mmfsdp.config": (*GROUND, "mmfsdp.basics.lazy", "mmfsdp.config"),
}


def module_name(path: Path) -> str:
    package = next(root for root in SOURCES.values() if path.is_relative_to(root))
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(*packages: str) -> list[Path]:
    return [path for package in packages or SOURCES for path in sorted(SOURCES[package].rglob("*.py"))]


def torch_free_modules() -> list[str]:
    files = [path for path in modules("mmfsdp") if path.relative_to(SOURCES["mmfsdp"]).parts[0] in TORCH_FREE]
    return [*map(module_name, files)]


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything that a file imports, functions included."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def dotted(node: ast.expr) -> str:
    """Return 'a.b.c' for an attribute chain that starts with a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def show(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} {name}"


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


class TestImportDirection:
    @pytest.mark.parametrize(
        ("package", "banned"),
        [
            ("mmfsdp", ("mmengine", "mmcv", "mmfsdp_mmengine", "mmfsdp_cli", "click", "rich")),
            ("mmfsdp_mmengine", ("mmfsdp_cli", "click", "rich")),
            ("mmfsdp_cli", ("mmengine", "mmcv", "mmfsdp_mmengine")),
        ],
    )
    def test_packages_know_only_what_is_below_them(self, package: str, banned: tuple[str, ...]) -> None:
        found = [
            show(path, line, name)
            for path in modules(package)
            for line, name in imported_names(path)
            if within(name, *banned)
        ]
        assert found == []

    @pytest.mark.parametrize("package", ["mmfsdp_mmengine", "mmfsdp_cli"])
    def test_nobody_reaches_into_private_core(self, package: str) -> None:
        found = []
        for path in modules(package):
            names = [*imported_names(path)]
            for node in ast.walk(ast.parse(path.read_text(), path)):
                if isinstance(node, ast.Attribute):
                    names.append((node.lineno, dotted(node)))
            found += [
                show(path, line, name)
                for line, name in names
                if within(name, "mmfsdp") and re.search(r"\._(?!_)", name)
            ]
        assert found == []

    @pytest.mark.parametrize("part", MAY_IMPORT)
    def test_torch_free_layers(self, part: str) -> None:
        found = [
            show(path, line, name)
            for path in modules("mmfsdp")
            if within(module_name(path), part)
            for line, name in imported_names(path)
            if within(name, "mmfsdp") and not within(name, *MAY_IMPORT[part])
        ]
        assert found == []

    def test_importing_the_torch_free_half_imports_no_torch(self) -> None:
        names = torch_free_modules()
        assert {"mmfsdp", "mmfsdp.errors", "mmfsdp.config", "mmfsdp.checkpoint"} <= {*names}
        script = (
            "import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    importlib.import_module(name)\n"
            "    heavy = {'torch', 'mmengine', 'numpy'} & {*sys.modules}\n"
            "    if heavy:\n"
            "        sys.exit(f'importing {name} imported {sorted(heavy)}')\n"
        )
        done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class TestModules:
    @pytest.mark.parametrize("path", modules(), ids=module_name)
    def test_begins_with_a_sentence_and_names_what_it_exports(self, path: Path) -> None:
        tree = ast.parse(path.read_text(), path)
        docstring = ast.get_docstring(tree, clean=False)
        assert docstring, "no module docstring"
        assert docstring.splitlines()[0].strip(), "the docstring's first line is empty"
        if path.name in ("__init__.py", "__main__.py"):  # may fill in what it exports lazily; exports nothing
            return
        targets = [
            dotted(target)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        assert "__all__" in targets, "no __all__"

    @pytest.mark.parametrize("package", SOURCES)
    def test_is_typed(self, package: str) -> None:
        assert (SOURCES[package] / "py.typed").is_file()


class TestPackaging:
    def test_versions_are_equal(self) -> None:
        projects = [tomllib.loads(path.read_text())["project"] for path in PROJECTS]
        assert sorted(project["name"] for project in projects) == ["mmfsdp", "mmfsdp-cli", "mmfsdp-mmengine"]
        versions = {project["name"]: project["version"] for project in projects}
        for name, package in SOURCES.items():
            if declared := re.search(r'^__version__(?:: str)? = "(.+)"$', (package / "__init__.py").read_text(), re.M):
                versions[name] = declared[1]
        assert len({*versions.values()}) == 1, versions
        assert f"## {projects[0]['version']} " in (ROOT / "CHANGELOG.md").read_text()

    def test_adapter_and_cli_pin_core(self) -> None:
        for path in PROJECTS:
            project = tomllib.loads(path.read_text())["project"]
            ours = [item for item in project["dependencies"] if item.startswith("mmfsdp")]
            expected = {"mmfsdp": [], "mmfsdp-mmengine": ["mmfsdp[torch]=="], "mmfsdp-cli": ["mmfsdp=="]}
            assert ours == [f"{pin}{project['version']}" for pin in expected[project["name"]]], path

    def test_torch_is_an_extra(self) -> None:
        for path in PROJECTS:
            required = tomllib.loads(path.read_text())["project"]["dependencies"]
            assert [item for item in required if re.match(r"(torch|numpy)\b", item)] == [], path
        extras = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert f"torch>={'.'.join(map(str, MINIMUM_TORCH))}" in extras["torch"]

    def test_every_package_carries_the_license(self) -> None:
        text = (ROOT / "LICENSE").read_text()
        for path in PROJECTS:
            assert path.with_name("LICENSE").read_text() == text, path

    def test_torch_is_pinned(self) -> None:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        assert [line for line in lines if re.fullmatch(r"torch==[\d.]+", line)]

    def test_nox_installs_nothing_without_the_pin(self) -> None:
        text = (ROOT / "noxfile.py").read_text()
        unpinned = [
            line.strip()
            for line in text.splitlines()
            if "session.install(" in line and "*CONSTRAINTS" not in line and "*wheels" not in line
        ]
        assert unpinned == ['session.install("build")']  # a tool that knows nothing of torch


class TestCommands:
    readme = (ROOT / "README.md").read_text()

    def commands(self) -> list[str]:
        return [line for block in fenced(self.readme, "bash") for line in block.splitlines() if line]

    def test_ci_runs_the_command_that_the_readme_gives(self) -> None:
        script = ROOT / ".ci/run"
        assert script.stat().st_mode & 0o111, "not executable"
        command = next(line for line in self.commands() if line.endswith("nox -s tests"))
        assert command in script.read_text().splitlines()

    def test_the_two_first_commands_are_the_demo_and_the_tests(self) -> None:
        demo, tests = self.commands()[:2]
        assert demo.endswith("examples/digits/run_demo.py")
        assert demo.rpartition(" && ")[0] == tests.rpartition(" && ")[0], "they set up differently"
        assert all("-c constraints.txt" in command for command in (demo, tests))

    def test_files_and_sessions_in_commands_exist(self) -> None:
        sessions = re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), flags=re.M)
        for command in self.commands():
            words = shlex.split(command)
            files = [word for word in words if re.search(r"\.(py|txt|toml|sh)$", word)]
            assert [word for word in files if not (ROOT / word).exists()] == [], command
            if any(word.endswith("nox") for word in words) and "-s" in words:
                assert {*words[words.index("-s") + 1 :]} <= {*sessions}, command
