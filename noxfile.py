"""Sessions of nox: `tests` runs by default; every other one is asked for by name (`nox -s lint types`)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))  # torch is pinned wherever a session installs something
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
# The oldest, one with a stager that only 2.11 and 2.12 have, the pinned and the newest: mmfsdp/basics/torch_version.py
RELEASES = ("2.9.1", "2.11.0", TORCH.removeprefix("torch=="), "2.15.0")
CORE, ADAPTER, CLI = "packages/core", "packages/mmengine_adapter", "packages/cli"
CORE_WITH_TORCH = f"{CORE}[torch]"
ADAPTER_WITH_MMENGINE = f"{ADAPTER}[mmengine]"
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
# Four also on two cores: ranks wait for each other more than they work. In the order in which tests/conftest.py sorts.
PARALLEL = ("--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder")
USER_PROGRAM = "tests/typing_program.py"
TEST_TRUTHS = ("safetensors",)  # what tests compare with; core itself does not need it

# The environment that nox itself runs in. With venv_backend="none" a bare "python" would be the first one on PATH.
HERE = sys.executable


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests, without the exhaustive ones, in the current environment, so that torch is installed once."""
    run_tests(session, "not exhaustive")


@nox.session(venv_backend="none", default=False)
def exhaustive(session: nox.Session) -> None:
    """Run what `tests` leaves out: all cases of large products, replays of published runs, hosts that die."""
    run_tests(session, "exhaustive")


@nox.session(venv_backend="none", default=False)
def lint(session: nox.Session) -> None:
    """Check rules and format with ruff, in the current environment."""
    session.run(HERE, "-m", "ruff", "check", *session.posargs, ".")
    session.run(HERE, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", default=False)
def types(session: nox.Session) -> None:
    """Check the three packages, and a program that uses them, with mypy --strict, in the current environment."""
    session.run(HERE, "-m", "mypy", *session.posargs)


@nox.session(default=False)
def pyright(session: nox.Session) -> None:
    """Check the program that uses the packages with pyright, against the current environment."""
    session.install("pyright[nodejs]>=1.1.400")  # with a node of its own
    session.run("pyright", "--pythonpath", HERE, USER_PROGRAM)


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """Run the digits example, in the current environment."""
    session.run(HERE, "examples/digits/run_demo.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks named after ``--``, or all, in the current environment."""
    session.run(HERE, "benchmarks/run.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def coverage(session: nox.Session) -> None:
    """Run all tests and fail if branch coverage, ranks and commands in other processes included, is below 92 %."""
    session.run(HERE, "-m", "coverage", "erase")
    session.run(HERE, "-m", "coverage", "run", "-m", "pytest", *PARALLEL, *session.posargs)
    session.run(HERE, "-m", "coverage", "combine", "--quiet")
    session.run(HERE, "-m", "coverage", "report", "--skip-covered", "--sort=cover")


@nox.session(default=False)
def core_alone(session: nox.Session) -> None:
    """Install core with torch, without MMEngine and the CLI: its tests pass, and README's example with transformers."""
    install(session, CORE_WITH_TORCH, *TEST_TOOLS)
    expect_absent(session, "mmengine", "mmfsdp_mmengine", "mmfsdp_cli", "click")
    expect_absent(session, *TEST_TRUTHS)
    session.run("python", "-c", "import mmfsdp, mmfsdp.checkpoint, mmfsdp.config")
    install(session, *TEST_TRUTHS, "transformers>=5")
    session.run("python", "-m", "pytest", "tests/core", *session.posargs)
    session.run("python", "-m", "pytest", "tests/test_docs.py", "-k", "blocks_run and README")


@nox.session(default=False)
def adapter_alone(session: nox.Session) -> None:
    """Install core and the MMEngine adapter, without the CLI: its tests pass."""
    install(session, CORE_WITH_TORCH, ADAPTER_WITH_MMENGINE, *TEST_TOOLS, *TEST_TRUTHS)
    expect_absent(session, "mmfsdp_cli", "click")
    session.run("python", "-c", "import mmfsdp_mmengine")
    session.run("python", "-m", "pytest", "tests/mmengine_adapter", *session.posargs)


@nox.session(default=False)
@nox.parametrize("extra", ["mmengine", "lite", "onedl"])
def distributions(session: nox.Session, extra: str) -> None:
    """Run the adapter's tests beside each distribution of MMEngine: mmengine, mmengine-lite, onedl-mmengine."""
    install(session, CORE_WITH_TORCH, f"{ADAPTER}[{extra}]", *TEST_TOOLS, *TEST_TRUTHS)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/mmengine_adapter"]))


@nox.session(default=False)
def cli_alone(session: nox.Session) -> None:
    """Install the CLI alone, without torch and MMEngine, then with numpy: the tests that need neither pass."""
    install(session, CORE, CLI)
    expect_absent(session, "torch", "numpy", "mmengine", "mmfsdp_mmengine")
    session.run("python", "-c", EXPECT_SMALL, str(CLI_LIMIT))
    session.run("mmfsdp-cli", "--help", silent=True)
    install(session, *TEST_TOOLS)
    tests = ("python", "-m", "pytest", "tests/cli", "--ignore=tests/cli/with_torch")
    session.run(*tests, "--ignore=tests/cli/with_numpy", "--least=60", *session.posargs)
    install(session, f"{CORE}[numpy]")
    expect_absent(session, "torch", "mmengine", "mmfsdp_mmengine")
    session.run(*tests, "--least=65", *session.posargs)


@nox.session(default=False)
def stores(session: nox.Session) -> None:
    """Read and write checkpoints in S3, through s3fs, against a server on this machine."""
    # Without lower bounds pip tries releases of moto back to 2017 before it finds a botocore that suits all.
    tools = ("s3fs>=2025.2", "aiobotocore>=3", "moto[server,s3]>=5", "boto3")
    install(session, CORE_WITH_TORCH, *TEST_TOOLS, *TEST_TRUTHS, *tools)
    session.run("python", "-m", "pytest", "tests/stores", *session.posargs)


@nox.session(venv_backend="none", default=False)
def pages(session: nox.Session) -> None:
    """Open reports, and the built site, in headless Chromium, which must be on PATH: widths, themes, the keyboard."""
    session.run(HERE, "-m", "pytest", "tests/pages", *session.posargs)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Train ten families of real models, and in frameworks, sharded and not: a few minutes on two cores."""
    install(session, CORE_WITH_TORCH, ADAPTER_WITH_MMENGINE, *TEST_TOOLS, *TEST_TRUTHS, "-r", "requirements-models.txt")
    session.run("python", "-m", "pytest", "tests/models", "tests/distributed/test_frameworks.py", *session.posargs)


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """Inject 79 faults into a training loop, on two and four ranks, in float32 and bfloat16, and find each."""
    install(session, CORE_WITH_TORCH, *TEST_TOOLS)
    session.run("python", "-m", "pytest", "tests/parity", *session.posargs)


@nox.session(default=False)
def false_alarms(session: nox.Session) -> None:
    """Prove plans that are right, of 21 families of models, and write docs/appendix/proven_models.md."""
    install(session, CORE_WITH_TORCH)
    session.run("python", "-m", "tests.parity.false_alarms", *session.posargs)


@nox.session(venv_backend="none", default=False)
def campaign(session: nox.Session) -> None:
    """Inject random faults into the digits example until ``-- --faults 1000`` are done; a second call goes on."""
    session.run(HERE, "-m", "tests.campaign.campaign", *session.posargs)


@nox.session(default=False)
@nox.parametrize("extra", ["mmengine", "onedl"])
def configs(session: nox.Session, extra: str) -> None:
    """Run doctor and plan over every config of mmpretrain, mmdet and mmsegmentation; ``-- --sample 50 --rehearse``."""
    if extra == "onedl":
        session.install("setuptools>=77,<81", "wheel", "cython", "packaging", "numpy")
        session.install("--no-deps", "--no-build-isolation", "-r", "tests/configs/packages_onedl.txt")
    install(session, CORE_WITH_TORCH, f"{ADAPTER}[{extra}]", CLI)
    session.install("-r", "tests/configs/requirements.txt", TORCH)  # has another transformers than constraints.txt
    if extra == "mmengine":
        session.install("--no-deps", "-r", "tests/configs/packages_mmengine.txt")
    session.install("--no-deps", "torchvision", "timm")  # must not bring another torch
    if extra == "mmengine":  # recipes from mmpretrain
        session.install("pytest", "pytest-timeout", *TEST_TRUTHS, TORCH)
        tests = ("tests/models/test_shipping.py", "tests/models/test_mmpretrain_tutorial.py")
        session.run("python", "-W", "ignore", "-m", "pytest", *tests, "-k", "mmpretrain or mmdet")
    out = f"work_dirs/configs_{extra}"
    session.run("python", "-W", "ignore", "tests/configs/sweep.py", "--out", out, *session.posargs)


@nox.session(default=False)
@nox.parametrize("torch", [nox.param(release, id=release) for release in RELEASES])
def compat(session: nox.Session, torch: str) -> None:
    """Run all tests, or those named after ``--``, on the oldest, a middle, the pinned and the newest torch."""
    session.run_install("python", "tools/torch_on_cpu.py", torch)
    path = Path(session.create_tmp(), "constraints.txt")
    path.write_text((ROOT / "constraints.txt").read_text().replace(TORCH, f"torch=={torch}"))
    pins = ("-c", str(path))
    session.install("-r", "requirements-dev.txt", *pins)
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into docs/_build/html, in the current environment; a warning is an error."""
    words = ("-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    session.run(HERE, "-m", "sphinx", *words, external=True)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build wheels and sdists into dist/: each wheel from its sdist."""
    session.install(*BUILD_TOOLS)
    build_packages(session, ROOT, ROOT / "dist")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a release needs, and check it; ``-- 0.1.0`` for a tag. The current environment builds the site.

    It compares with a build of the last commit, reads metadata and licences, follows all links, and installs the
    wheels into fresh environments: there run the commands of README.md, and tests from the sdists.
    """
    session.install(*BUILD_TOOLS, "twine>=6.1")
    dist = ROOT / "dist"
    build_packages(session, ROOT, dist)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        session.run("git", "clone", "-q", str(ROOT), str(work / "clone"), external=True)
        build_packages(session, work / "clone", work / "again")
        for path in (work / "again").iterdir():
            if path.read_bytes() != (dist / path.name).read_bytes():
                session.error(f"Building the last commit gives another {path.name}. Is something not committed?")
        session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted((work / "again").iterdir())))
        session.run("python", "-m", "tools.release", str(dist), *session.posargs)
        shutil.rmtree(ROOT / "docs" / "_build", ignore_errors=True)  # Sphinx leaves pages that are gone
        docs(session)
        session.run("python", "-m", "tools.links", "docs/_build/html")
        check_wheels(session, dist, work)


def check_wheels(session: nox.Session, dist: Path, work: Path) -> None:
    """Install the wheels into fresh environments, and run there what users run, and tests from the sdists."""
    version = next(dist.glob("mmfsdp-*.whl")).name.split("-")[1]
    wheels = ("--find-links", str(dist), *CONSTRAINTS)

    def environment(name: str, *requirements: str) -> str:
        session.run("python", "-m", "venv", str(work / name))
        python = str(work / name / "bin" / "python")
        ours = [item.replace("~", f"=={version}") for item in requirements]
        session.run(python, "-m", "pip", "install", "-q", *ours, *wheels, external=True)
        return python

    def run_tests_of(python: str, name: str, *tests: str) -> None:
        shutil.unpack_archive(dist / f"{name}-{version}.tar.gz", work / "sdists", filter="data")
        with session.chdir(work / "sdists" / f"{name}-{version}"):
            session.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, external=True)

    alone = environment("cli", "mmfsdp-cli~", *TEST_TOOLS)
    with session.chdir(work):
        session.run(alone, "-c", ABSENT, "torch", "numpy", "mmengine", "mmfsdp_mmengine", external=True)
        session.run(alone, "-m", "mmfsdp_cli", "--help", external=True, silent=True)
    run_tests_of(alone, "mmfsdp_cli", "tests/cli/test_cli_convert.py")
    every = environment(
        "all", "mmfsdp[torch]~", "mmfsdp-mmengine[mmengine]~", "mmfsdp-cli~", "transformers", *TEST_TOOLS, *TEST_TRUTHS
    )
    session.run(every, "-c", INSTALLED, external=True)
    chosen = ("tests/test_docs.py", "-k", "blocks_run and README")
    session.run(every, "-m", "pytest", "-q", *chosen, external=True)
    # All tests are collected, which takes what they import, and some run.
    run_tests_of(every, "mmfsdp", "tests/core", "-k", "test_roundtrip or test_policies or test_earlier_releases")
    run_tests_of(every, "mmfsdp_mmengine", "tests/mmengine_adapter", "-k", "test_training")
    run_tests_of(every, "mmfsdp_cli", "tests/cli", "-k", "test_cli_plan")


def build_packages(session: nox.Session, root: Path, dist: Path) -> None:
    """Build the wheel and the sdist of each package into an empty folder."""
    for old in dist.glob("mmfsdp*"):
        old.unlink()
    for package in (CORE, ADAPTER, CLI):
        words = ("--no-isolation", "--outdir", str(dist), str(root / package))
        session.run("python", "-m", "build", *words, silent=True)


BUILD_TOOLS = ("build>=1.2", "hatchling>=1.27")
ABSENT = (
    "import importlib.util, sys; found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]; "
    "sys.exit(f'should not be installed: {found}' if found else 0)"
)
INSTALLED = (
    "import mmfsdp, mmfsdp_cli, mmfsdp_mmengine, sys; "
    "found = [module.__file__ for module in (mmfsdp, mmfsdp_cli, mmfsdp_mmengine)]; "
    "sys.exit(0 if all(path.startswith(sys.prefix) for path in found) else f'not those of the wheels: {found}')"
)

# Measures what `pip install mmfsdp-cli` takes, without the tools that a virtual environment begins with.
EXPECT_SMALL = """
import pathlib, sys, sysconfig
tools = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
site = pathlib.Path(sysconfig.get_path("purelib"))
files = [path for path in site.rglob("*") if path.is_file()]
size = sum(path.stat().st_size for path in files if not path.relative_to(site).parts[0].startswith(tools)) / 1e6
print(f"mmfsdp-cli and what it requires take {size:.1f} MB")
sys.exit(f"more than {sys.argv[1]} MB" if size > float(sys.argv[1]) else 0)
"""
CLI_LIMIT = 60  # MB


def run_tests(session: nox.Session, marked: str) -> None:
    """Run tests by their marks in the current environment, on several workers: much of their time is waiting."""
    # Hundreds of processes import the packages and tests, so they keep what they compiled, also where the environment
    # forbids it: else each worker rewrites the assertions of all tests anew, a large part of what collecting takes.
    session.run(HERE, "-m", "compileall", "-q", "packages", "examples", "benchmarks", "tests", silent=True)
    chosen = ("-m", marked, *session.posargs)
    session.run(HERE, "-m", "pytest", *PARALLEL, *chosen, env={"PYTHONDONTWRITEBYTECODE": ""})


def install(session: nox.Session, *requirements: str) -> None:
    """Install local packages (as they would be from an index, not editable) and tools, with torch pinned."""
    local = [f"./{item}" if item.startswith("packages/") else item for item in requirements]
    session.install(*local, *CONSTRAINTS)


def expect_absent(session: nox.Session, *modules: str) -> None:
    """Fail if one of the modules can be found in the session's environment."""
    session.run("python", "-c", ABSENT, *modules)
