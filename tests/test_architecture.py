"""Tests of the repository itself: levels of imports, equal versions, one way to set up and test."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mmfsdp.basics.installing import FOLDERS
from mmfsdp.basics.torch_version import MINIMUM_TORCH
from mmfsdp.checkpoint.formats.registry import FORMATS

ROOT = Path(__file__).parent.parent
SOURCES = {
    "mmfsdp": ROOT / "packages/core/src/mmfsdp",
    "mmfsdp_mmengine": ROOT / "packages/mmengine_adapter/src/mmfsdp_mmengine",
    "mmfsdp_cli": ROOT / "packages/cli/src/mmfsdp_cli",
}
PROJECTS = sorted((ROOT / "packages").glob("*/pyproject.toml"))

# The half of core that must work without torch.
TORCH_FREE = ("__init__.py", "errors.py", "basics", "config", "checkpoint")

# The subpackages of core, lowest level first. Each imports those named beside it, which all lie on lower levels.
LEVELS: tuple[dict[str, str], ...] = (
    {"errors": ""},
    {"basics": "errors"},
    {"config": "basics errors", "collective": "basics errors", "testing": "basics errors"},
    {"checkpoint": "basics config errors", "planning": "basics config errors"},
    {"runtime": "basics collective errors planning"},
    {
        "state": "basics collective errors runtime",
        "optimizers": "basics collective errors planning runtime",
    },
    {
        "sharding": "basics collective config errors planning runtime state",
        "saving": "basics checkpoint collective errors runtime state",
    },
    {
        "rehearsal": "basics config errors optimizers planning runtime sharding state",
        "torch_style": "basics collective config errors planning runtime sharding state",
    },
    {
        "frontends": "basics checkpoint errors planning rehearsal sharding torch_style",
        "parity": "basics config errors planning rehearsal runtime saving sharding state testing",
    },
)
MAY_IMPORT = {subpackage: allowed.split() for level in LEVELS for subpackage, allowed in level.items()}
MOST_SUBPACKAGES = 16
MOST_MODULES = 17  # in one folder

# What mmfsdp.checkpoint holds, ground level first: each imports only what is on lower levels.
CHECKPOINT_LEVELS: tuple[tuple[str, ...], ...] = (
    ("chunks", "damage"),
    ("failed_downloads", "integrity", "remote"),
    ("entries",),
    ("layout", "empty_weights"),
    ("geometry", "manifest", "pickles"),
    ("manifest_search", "tree"),
    ("files", "state_keys"),
    ("recipes",),
    ("formats",),
    ("inspection", "retention"),
    ("conversion",),
    ("arithmetic",),
)

# The adapter and the command line import only what the __init__ of a subpackage exports. These export names as well.
OPEN_MODULES = ("mmfsdp", "mmfsdp.errors", "mmfsdp.testing")


# What functions may import of their own package, because few calls need it and it takes time to import. These imports
# count for levels and circles as all others do.
LAZY = (
    "mmfsdp.checkpoint.conversion.uploading",
    "mmfsdp.checkpoint.formats",
    "mmfsdp.checkpoint.recipes",
    "mmfsdp.checkpoint.remote",
    "mmfsdp.checkpoint.state_keys",
)

# The only modules that import by a name in a string, and what.
IMPORT_BY_NAME = {
    "mmfsdp.basics.lazy": "what the public names of a package stand for, as its stub lists them",
    "mmfsdp.basics.references": "what a user's config names",
    "mmfsdp.checkpoint.formats.huggingface.memory_names": "transformers and torch, which need not be installed",
    "mmfsdp.frontends.model_building": "transformers, which need not be installed",
    "mmfsdp.testing": "what the process that forks ranks imports beforehand",
    "mmfsdp_mmengine.configs.lookup": "the package of a scope, which MMEngine could not import",
    "mmfsdp_cli.main": "the module of a command",
}


def module_name(path: Path) -> str:
    package = next(root for root in SOURCES.values() if path.is_relative_to(root))
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules(*packages: str) -> list[Path]:
    return [path for package in packages or SOURCES for path in sorted(SOURCES[package].rglob("*.py"))]


def torch_free_modules() -> list[str]:
    files = [path for path in modules("mmfsdp") if path.relative_to(SOURCES["mmfsdp"]).parts[0] in TORCH_FREE]
    return [*map(module_name, files)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(parsed(path))]


@functools.cache
def imported_names(path: Path) -> list[tuple[int, str]]:
    """Return line and absolute dotted name of everything that a file imports, functions and its stub included."""
    stub = path.with_suffix(".pyi")
    return [*_imported_names(path), *(_imported_names(stub) if stub.exists() else ())]


@functools.cache
def _imported_names(path: Path) -> list[tuple[int, str]]:
    return [*_found_names(path)]


def _found_names(path: Path) -> Iterator[tuple[int, str]]:
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def assigned(tree: ast.Module) -> set[str]:
    """The names that a module assigns at its top."""
    return {
        dotted(target)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def dotted(node: ast.expr) -> str:
    """Return 'a.b.c' for an attribute chain that starts with a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


@functools.cache
def executed_names(path: Path, *, at_top: bool = True) -> list[tuple[int, str]]:
    """Return what a file imports when it runs, ``if TYPE_CHECKING`` left out.

    Args:
        path: The file.
        at_top: Return what is imported with the module; otherwise what its functions import when they are called.
    """
    inner: set[int] = set()
    hidden: set[int] = set()
    for node in nodes_of(path):
        lines = range(node.lineno, (node.end_lineno or 0) + 1) if isinstance(node, ast.stmt) else ()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.update(lines)
        elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            hidden.update(lines)
    return [
        (line, name) for line, name in _imported_names(path) if line not in hidden and (line not in inner) is at_top
    ]


@functools.cache
def long_names() -> frozenset[str]:
    """The names of all modules that no logger has."""
    return frozenset(name for file in modules() if (name := module_name(file)).count(".") > 1)


def hidden_imports(path: Path) -> list[int]:
    """Return the lines that import by a string, or hold one that is the name of a module here.

    A name such as ``mmfsdp.saving`` does not count, as that of a logger.
    """
    nodes = nodes_of(path)
    calls = {"__import__", "importlib.import_module", "importlib.__import__"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            calls |= {alias.asname or alias.name for alias in node.names if "import" in alias.name}
    found = [node.lineno for node in nodes if isinstance(node, ast.Call) and dotted(node.func) in calls]
    return found + [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in long_names()]


def module_graph(package: str) -> dict[str, set[str]]:
    """Return for each module of a package the modules of it that it imports, in functions and for annotations too."""
    names = {module_name(path) for path in modules(package)}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path in modules(package):
        for _, name in imported_names(path) if path.name != "__init__.py" else ():  # which only exports
            target = name if name in names else name.rpartition(".")[0]
            if target in names:
                graph[module_name(path)].add(target)
    return graph


def subpackage_graph(package: str, folder: str) -> dict[str, set[str]]:
    """Return what the modules and folders in one folder import of each other, for annotations too."""
    subpackages: dict[str, set[str]] = {}
    graph: dict[str, set[str]] = {}
    for path in modules(package):
        here = module_name(path)
        if path.name == "__init__.py" or not here.startswith(f"{folder}."):
            continue  # an __init__ only exports what its folder holds
        own = here.removeprefix(f"{folder}.").split(".")[0]
        for _, name in imported_names(path):
            if not name.startswith(f"{folder}."):
                continue
            target = name.removeprefix(f"{folder}.").split(".")[0]
            if target != own:
                graph.setdefault(own, set()).add(target)
        subpackages.setdefault(own, set())
    return subpackages | graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, and nodes that import themselves."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            place = stack.index(node)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1 or node in graph.get(node, ()):
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def exported(module: str) -> set[str]:
    """Return the public names of a module of core, without importing it."""
    path = SOURCES["mmfsdp"].parent / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (stub := path.with_suffix(".pyi")).exists():
        return {name.rpartition(".")[2] for _, name in _imported_names(stub)} | assigned(parsed(stub))
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    return set()


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
    def test_adapter_and_cli_import_exported_names_of_subpackages(self, package: str) -> None:
        open_to_all = {*OPEN_MODULES, *(f"mmfsdp.{subpackage}" for subpackage in MAY_IMPORT)}
        names = {module: exported(module) for module in open_to_all} | {"": {*open_to_all}}
        found = []
        for path in modules(package):
            for line, name in imported_names(path):
                module, _, attribute = name.rpartition(".")
                if within(name, "mmfsdp") and name not in open_to_all and attribute not in names.get(module, ()):
                    found.append(show(path, line, name))
        assert found == []

    @pytest.mark.parametrize("package", ["mmfsdp_mmengine", "mmfsdp_cli"])
    def test_nobody_reaches_into_private_core(self, package: str) -> None:
        found = []
        for path in modules(package):
            names = [*imported_names(path)]
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Attribute):
                    names.append((node.lineno, dotted(node)))
            found += [
                show(path, line, name)
                for line, name in names
                if within(name, "mmfsdp") and re.search(r"\._(?!_)", name)
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


class TestSubpackages:
    def test_every_subpackage_has_its_level(self) -> None:
        entries = {path.stem for path in SOURCES["mmfsdp"].iterdir() if path.suffix == ".py" or path.is_dir()}
        subpackages = entries - {"__init__", "__pycache__"}
        assert subpackages == {*MAY_IMPORT}
        assert len(subpackages) <= MOST_SUBPACKAGES

    def test_subpackages_lie_above_what_they_import(self) -> None:
        below: set[str] = set()
        for level in LEVELS:
            for subpackage in level:
                assert {*MAY_IMPORT[subpackage]} <= below, subpackage
            below |= {*level}

    @pytest.mark.parametrize("subpackage", MAY_IMPORT)
    def test_imports_only_subpackages_below(self, subpackage: str) -> None:
        allowed = ("mmfsdp.__version__", *(f"mmfsdp.{name}" for name in (subpackage, *MAY_IMPORT[subpackage])))
        found = [
            show(path, line, name)
            for path in modules("mmfsdp")
            if within(module_name(path), f"mmfsdp.{subpackage}")
            for line, name in imported_names(path)
            if within(name, "mmfsdp") and not within(name, *allowed)
        ]
        assert found == []

    @pytest.mark.parametrize("subpackage", MAY_IMPORT)
    def test_the_table_names_no_subpackage_that_is_not_imported(self, subpackage: str) -> None:
        assert subpackage_graph("mmfsdp", "mmfsdp")[subpackage] | {"basics", "errors"} >= {*MAY_IMPORT[subpackage]}

    @pytest.mark.parametrize("package", SOURCES)
    def test_modules_form_no_circle(self, package: str) -> None:
        assert circles(module_graph(package)) == []

    @pytest.mark.parametrize("package", SOURCES)
    def test_folders_form_no_circle(self, package: str) -> None:
        folders = [module_name(path) for path in modules(package) if path.name == "__init__.py"]
        assert {folder: found for folder in folders if (found := circles(subpackage_graph(package, folder)))} == {}

    def test_the_checkpoint_subpackage_has_one_direction(self) -> None:
        level = {name: number for number, names in enumerate(CHECKPOINT_LEVELS) for name in names}
        graph = subpackage_graph("mmfsdp", "mmfsdp.checkpoint")
        assert {*graph} <= {*level}
        upward = [
            f"{subpackage} -> {used}"
            for subpackage, below in graph.items()
            for used in below
            if level[used] >= level[subpackage]
        ]
        assert upward == []

    @pytest.mark.parametrize("package", SOURCES)
    def test_functions_import_of_their_own_package_only_what_few_calls_need(self, package: str) -> None:
        found = [
            show(path, line, name)
            for path in modules(package)
            for line, name in executed_names(path, at_top=False)
            if within(name, package) and not within(name, *LAZY)
        ]
        assert found == []

    @pytest.mark.parametrize("lazy", LAZY)
    def test_what_is_listed_as_lazy_is_imported_by_a_function(self, lazy: str) -> None:
        assert any(within(name, lazy) for path in modules("mmfsdp") for _, name in executed_names(path, at_top=False))

    def test_strings_import_nothing_that_the_other_tests_do_not_see(self) -> None:
        assert {module_name(path) for path in modules() if hidden_imports(path)} == {*IMPORT_BY_NAME}

    @pytest.mark.parametrize(
        "code",
        [
            "from importlib import import_module as load\nload('mmfsdp.errors')",
            "import importlib\nimportlib.import_module(f'mmfsdp.{name}')",
            "__import__('mmfsdp.errors')",
            "where = 'mmfsdp.checkpoint.formats.registry'",
        ],
    )
    def test_imports_by_string_are_found(self, code: str, tmp_path: Path) -> None:
        (file := tmp_path / "module.py").write_text(code)
        assert hidden_imports(file)

    def test_imports_by_functions_count_for_levels_and_circles(self) -> None:
        package = SOURCES["mmfsdp"] / "checkpoint"
        calls = {name for _, name in executed_names(package / "files/disk.py", at_top=False)}
        assert "mmfsdp.checkpoint.remote.paths.remote_path" in calls
        assert "mmfsdp.checkpoint.remote.paths" in module_graph("mmfsdp")["mmfsdp.checkpoint.files.disk"]
        assert "remote" in subpackage_graph("mmfsdp", "mmfsdp.checkpoint")["files"]

    def test_only_formats_compare_names_of_formats(self) -> None:
        names = {item.name for item in FORMATS}
        formats = SOURCES["mmfsdp"] / "checkpoint" / "formats"
        readers = [SOURCES["mmfsdp"] / name for name in ("checkpoint", "saving", "state")]
        tables = ast.Tuple | ast.List | ast.Set | ast.Dict  # a list of names is there to be compared with
        found = [
            show(path, constant.lineno, str(constant.value))
            for path in modules("mmfsdp")
            if any(map(path.is_relative_to, readers)) and not path.is_relative_to(formats)
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Compare | ast.MatchValue | tables)
            for part in (filter(None, node.keys) if isinstance(node, ast.Dict) else [node])
            for constant in ast.walk(part)
            if isinstance(constant, ast.Constant) and constant.value in names
        ]
        assert found == []

    @pytest.mark.parametrize("subpackage", ["runtime", "sharding", "state", "optimizers", "saving", "torch_style"])
    def test_what_differs_between_engines_is_asked_of_the_engine(self, subpackage: str) -> None:
        found = [
            show(path, constant.lineno, str(constant.value))
            for path in (SOURCES["mmfsdp"] / subpackage).rglob("*.py")
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Compare | ast.MatchValue)
            for constant in ast.walk(node)
            if isinstance(constant, ast.Constant) and constant.value in ("fsdp2", "fsdp1", "replicate")
        ]
        assert found == []

    def test_formats_import_neither_their_list_nor_what_opens_them(self) -> None:
        folder = SOURCES["mmfsdp"] / "checkpoint" / "formats"
        above = {path for path in folder.glob("*.py") if path.name != "__init__.py"}
        assert {path.stem for path in above} == {"opening", "registry"}
        found = [
            show(path, line, name)
            for path in {*folder.rglob("*.py")} - above
            for line, name in imported_names(path)
            if within(name, *map(module_name, above))
        ]
        assert found == []

    def test_no_folder_is_crowded(self) -> None:
        """What a folder holds is seen at one look. One with more becomes several, and the __init__ of each says why."""
        folders = {path.parent for path in modules()}
        sizes = {folder: len([*folder.glob("*.py")]) - (folder / "__init__.py").exists() for folder in folders}
        assert {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > MOST_MODULES} == {}

    def test_circles_are_found(self) -> None:
        assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}) == [["a", "b", "c"], ["d"]]
        assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


class TestModules:
    def test_begins_with_a_sentence(self) -> None:
        docstrings = {module_name(path): ast.get_docstring(parsed(path), clean=False) or "" for path in modules()}
        assert len(docstrings) > 200
        assert [name for name, text in docstrings.items() if not text.partition("\n")[0].strip()] == []

    def test_names_what_it_exports(self) -> None:
        # A package may fill in what it exports lazily; a program exports nothing.
        paths = [path for path in modules() if path.name not in ("__init__.py", "__main__.py")]
        assert [module_name(path) for path in paths if "__all__" not in assigned(parsed(path))] == []

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

    def test_each_package_has_its_folder(self) -> None:
        names = {tomllib.loads(path.read_text())["project"]["name"]: path.parent for path in PROJECTS}
        assert {name: str(folder.relative_to(ROOT)) for name, folder in names.items()} == FOLDERS

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
            if "session.install(" in line
            and not any(pin in line for pin in ("*CONSTRAINTS", "*pins", "*wheels", "TORCH", "--no-deps"))
        ]
        assert unpinned == [  # tools that know nothing of torch
            'session.install("pyright[nodejs]>=1.1.400")  # with a node of its own',
            'session.install("setuptools>=77,<81", "wheel", "cython", "packaging", "numpy")',
            "session.install(*BUILD_TOOLS)",
            'session.install(*BUILD_TOOLS, "twine>=6.1")',
        ]


class TestCommands:
    readme = (ROOT / "README.md").read_text()

    def commands(self) -> list[str]:
        return [line for block in fenced(self.readme, "bash") for line in block.splitlines() if line]

    def test_ci_runs_the_command_that_the_readme_gives(self) -> None:
        script = ROOT / ".ci/run"
        assert script.stat().st_mode & 0o111, "not executable"
        command = next(line for line in self.commands() if line.endswith("nox -s tests"))
        lines = script.read_text().splitlines()
        assert command in lines
        others = command.replace("nox -s tests", "nox -s exhaustive &").rpartition(" && ")[2]
        assert others in lines, "what that command leaves out"

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
