"""Runs the Python and the commands of README.md and docs/, and compares what they print with what the pages show."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import shlex
import shutil
import tomllib
import warnings
from pathlib import Path

import pytest
from tests.console_blocks import IS_PINNED, plain, walk
from tests.doc_pages import PAGES, ROOT, blocks, name, outputs, script_of
from tests.forked_scripts import run_script
from tests.test_architecture import CHECKPOINT_LEVELS, LEVELS

from mmfsdp.basics.installing import FOLDERS, ON_INDEX, REPOSITORY

SECONDS = 240  # for all blocks of one page
CHOSEN_BY_TIME = {"docs/howto/fit.md"}  # with other releases of torch, which take other times, it only has to run
GENERATED = (  # files and the beginnings of others: of any length, and not counted
    "docs/appendix/",
    "docs/explanation/validation.md",
    "docs/reference/api",
    "docs/reference/cli.md",
    "docs/reference/compatibility.md",
)
TESTED_ELSEWHERE = {
    *("docs/tutorials/train_a_model.md", "docs/tutorials/rent_gpus.md"),  # by test_tutorial.py
    "docs/tutorials/mmpretrain.md",  # by models/test_mmpretrain_tutorial.py, where mmpretrain is installed
}

# In `nox -s exhaustive` only: they take longest, and what they show has tests of its own.
LONG = {
    *(
        "docs/howto/arithmetic.md",
        "docs/howto/convert.md",
        "docs/appendix/device_operators.md",
        "docs/howto/fit.md",
    ),
    *("docs/howto/frameworks.md", "docs/howto/lora.md", "docs/howto/resume.md"),
    *(
        "docs/howto/huggingface.md",
        "docs/howto/inspect.md",
        "docs/howto/mmengine.md",
        "docs/howto/recipes.md",
        "docs/explanation/rehearsal.md",
    ),
    "docs/explanation/rehearsal_time.md",
}

# A terminal wide enough that help is neither wrapped nor cut, without colours.
PLAIN = {"COLUMNS": "240", "TERMINAL_WIDTH": "240", "NO_COLOR": "1", "TERM": "dumb"}
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
SHELL = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"}

PYTHON_PAGES = [page for page in PAGES if any(block.runs and block.language == "python" for block in blocks(page))]
CONSOLE_PAGES = [
    page
    for page in PAGES
    if page not in PYTHON_PAGES and name(page) not in TESTED_ELSEWHERE and any(block.runs for block in blocks(page))
]


@pytest.mark.sample(*(name(page) for page in PYTHON_PAGES if name(page) not in LONG))
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    # A script named like a package would hide it.
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(script_of(page), encoding="utf-8")
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_script(script, working_directory(tmp_path), {**os.environ, "PYTHONPATH": paths}, SECONDS)
    assert done.returncode == 0, f"{name(page)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    printed = outputs(page, done.stdout)
    if not IS_PINNED and name(page) in CHOSEN_BY_TIME:
        return
    for before, block in itertools.pairwise(blocks(page)):
        if block.language == "text" and block.illustrative is None:
            assert plain(printed[before.line]) == plain(block.text), (
                f"{name(page)}:{block.line} shows another output than the block above it prints:\n"
                f"{printed[before.line]}"
            )


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("page", CONSOLE_PAGES, ids=name)
def test_console_blocks_run(page: Path, tmp_path: Path) -> None:
    walk([block.text for block in blocks(page) if block.runs], working_directory(tmp_path))


def working_directory(folder: Path) -> Path:
    """Make a directory with nothing but a copy of `examples/`."""
    directory = folder / "cwd"
    shutil.copytree(
        ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("__pycache__", "work_dirs")
    )
    return directory


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shown_output_is_compared(page: Path) -> None:
    # A text block shows what the Python block above it prints, or says why it is not compared.
    for before, block in itertools.pairwise([None, *blocks(page)]):
        if block is not None and block.language == "text" and block.illustrative is None:
            assert before is not None, f"{name(page)}:{block.line}"
            assert before.runs, f"{name(page)}:{block.line}: what is this the output of?"
            assert before.language == "python", f"{name(page)}:{block.line}: what is this the output of?"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quoted_code_is_that_of_the_example(page: Path) -> None:
    for block in blocks(page):
        if block.source is not None:
            text = (ROOT / block.source).read_text(encoding="utf-8")
            assert block.text in text, f"{name(page)}:{block.line}: not in {block.source}"


def test_python_blocks_parse() -> None:
    # `py` are parts of configs: they are only parsed.
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("python", "py") and block.source is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    compile("\n" * (block.line - 1) + block.text, name(page), "exec")


def command_lines() -> list[tuple[str, str]]:
    """Return place and text of every `$ mmfsdp-cli ...` line in console blocks, continuation lines joined."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                text = re.sub(r"\\\n\s*>?\s*", " ", block.text)
                found += [
                    (name(page), line[2:].strip()) for line in text.splitlines() if line.startswith("$ mmfsdp-cli")
                ]
    return sorted({*found})


@functools.cache
def help_of(*command: str) -> str | None:
    """Return the help of a command, or None if there is no such command."""
    from click.testing import CliRunner  # not on top: the README's blocks also run where only core is installed

    from mmfsdp_cli.main import app

    done = CliRunner(env=PLAIN).invoke(app, [*command, "--help"])
    return ESCAPE.sub("", done.output) if done.exit_code == 0 else None


COMMANDS = command_lines()


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_command_lines_exist(page: str, line: str) -> None:
    words = list(itertools.takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True)[1:]))
    command: tuple[str, ...] = ()
    text = help_of()
    assert text is not None, "mmfsdp-cli --help fails"
    while words and re.search(r"Usage:.* COMMAND", text) and not words[0].startswith("-"):
        command = (*command, words.pop(0))
        text = help_of(*command)
        assert text is not None, f"no such command: mmfsdp-cli {' '.join(command)}"
    options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    missing = [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)]
    assert missing == [], f"mmfsdp-cli {' '.join(command)} has no {missing}; its help:\n{text}"


def words_of(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").glob("*.md")], ids=name)
def test_pages_are_short(page: Path) -> None:
    is_read_rarely = name(page).startswith(("docs/adr/", "benchmarks/"))
    limit = {"README.md": 700, "CHANGELOG.md": 900}.get(name(page), 2000 if is_read_rarely else 1800)
    assert name(page).startswith(GENERATED) or words_of(page) <= limit


def test_all_pages_together_are_short() -> None:
    pages = [page for page in PAGES if name(page).startswith("docs/") and not name(page).startswith("docs/adr/")]
    assert sum(words_of(page) for page in pages if not name(page).startswith(GENERATED)) <= 50_600


def test_every_page_can_be_reached() -> None:
    """A page is in the sidebar, or a page that can be reached has a link to it."""
    index = ROOT / "docs" / "index.md"
    trees = re.findall(r"^```{toctree}\n(.*?)^```", index.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    reached, new = set[Path](), {index, *(index.parent / f"{line}.md" for line in lines)}
    while new:
        reached |= new
        links = {
            (page.parent / link).resolve()
            for page in new
            for link in re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text(encoding="utf-8"))
        }
        new = {link for link in links if link in PAGES} - reached
    off_the_site = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    assert [name(page) for page in PAGES if page not in (*off_the_site, *reached) and "adr" not in page.parts] == []


OURS = re.compile(r"pip install [^`\n]*?(?<![\w./-])'?\"?(mmfsdp(?:-\w+)?(?:\[\w+\])?)(?![\w\[-])(?! @ git)")


def test_lines_that_install_work() -> None:
    """Until the packages are on an index, each line takes them from a clone, from git, or from built wheels."""
    texts = {name(page): page.read_text(encoding="utf-8") for page in [*PAGES, *ROOT.glob("packages/*/README.md")]}
    found = [(page, match[0]) for page, text in texts.items() for match in OURS.finditer(text)]
    if ON_INDEX:
        assert found, "pages should show the short lines now"
    else:
        assert [pair for pair in found if "--find-links dist" not in pair[1] and "docs/adr" not in pair[0]] == []
        sources = [path for path in ROOT.glob("packages/*/src/**/*.py") if path.name != "installing.py"]
        assert [path for path in sources if OURS.search(path.read_text(encoding="utf-8"))] == []


def test_the_address_is_in_the_metadata() -> None:
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in FOLDERS.values()]
    urls = {project.get("urls", {}).get("Repository", "URL") for project in projects}
    assert urls == {REPOSITORY}
    assert not ON_INDEX or REPOSITORY != "URL"


def test_files_that_pages_name_exist() -> None:
    """A name ends the path of a file: `runtime/gradients/clipping.py` is one of core's."""
    paths = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        for found in re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+\.py)`", page.read_text()):
            assert any(path.endswith(f"/{found}") for path in paths), f"{name(page)} names {found}"


def test_the_map_has_every_subpackage_at_its_level() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    for levels, prefix in ((LEVELS, r"mmfsdp\."), (CHECKPOINT_LEVELS, "")):
        rows = re.findall(rf"^\| (\d+) \| `{prefix}(\w+)` \|", text, flags=re.MULTILINE)
        expected = {subpackage: level for level, subpackages in enumerate(levels) for subpackage in subpackages}
        assert {subpackage: int(level) for level, subpackage in rows} == expected


PUBLIC_SUBPACKAGES = sorted(
    name
    for package, names in {
        "mmfsdp": ["", *(f".{subpackage}" for subpackages in LEVELS for subpackage in subpackages)],
        "mmfsdp_mmengine": [""],
    }.items()
    for name in (package + name for name in names)
)


@pytest.mark.parametrize("subpackage", PUBLIC_SUBPACKAGES)
def test_api_page_has_every_public_name(subpackage: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("api*.md")))
    section = text.partition(f"## {subpackage}\n")[2].partition("\n## ")[0]
    public = {*importlib.import_module(subpackage).__all__} - {"__version__"}
    assert {*re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)} == public
    described = {*re.findall(rf"^\.\. (?:auto|py:)\w+:: {re.escape(subpackage)}\.(\w+)$", section, flags=re.MULTILINE)}
    above = {*importlib.import_module("mmfsdp").__all__} if subpackage != "mmfsdp" else set()
    assert public - above <= described <= public
