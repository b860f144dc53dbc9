"""Sessions of nox: `tests` runs by default; every other one is asked for by name (`nox -s lint types`)."""

from __future__ import annotations

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
    install(session, *TEST_TRUTHS)
    session.run("python", "-m", "pytest", "tests/core", *session.posargs)
    install(session, "transformers>=5")
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
    """Open reports in headless Chromium, which must be on PATH: three widths, two themes, the keyboard."""
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
        session.run(
            "python", "-W", "ignore", "-m", "pytest", "tests/models/test_shipping.py", "-k", "mmpretrain or mmdet"
        )
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
    session.run(HERE, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build wheels and sdists into dist/, and import each package from its wheel, outside the repository."""
    session.install("build")
    dist = ROOT / "dist"
    for old in [*dist.glob("mmfsdp*.whl"), *dist.glob("mmfsdp*.tar.gz")]:
        old.unlink()
    for package in (CORE, ADAPTER, CLI):
        session.run("python", "-m", "build", "--outdir", str(dist), package, silent=True)
    found = sorted(path.name for path in dist.iterdir() if path.name.startswith("mmfsdp"))
    if len(found) != 6:
        session.error(f"Expected three wheels and three sdists, got {found}.")
    # The pinned dependencies between the three resolve to the wheels just built, one package at a time.
    wheels = ("--find-links", str(dist), *CONSTRAINTS)
    session.install("mmfsdp==0.1.0", *wheels)
    with session.chdir(tempfile.gettempdir()):
        session.run("python", "-c", "import mmfsdp, mmfsdp.checkpoint")
        expect_absent(session, "mmengine", "mmfsdp_mmengine", "mmfsdp_cli")
        session.install("mmfsdp-cli==0.1.0", *wheels)
        session.run("mmfsdp-cli", "--help", silent=True)
        expect_absent(session, "mmengine", "mmfsdp_mmengine")
        session.install("mmfsdp-mmengine==0.1.0", *wheels)
        expect_absent(session, "mmengine")
        session.run("python", "-c", "import mmfsdp_mmengine", success_codes=[1], silent=True)  # says what to install
        session.install("mmfsdp-mmengine[mmengine]==0.1.0", *wheels)
        session.run("python", "-c", "import mmfsdp_mmengine")


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
    session.run(
        "python",
        "-c",
        "import importlib.util, sys; found = [m for m in sys.argv[1:] if importlib.util.find_spec(m)]; "
        "sys.exit(f'should not be installed: {found}' if found else 0)",
        *modules,
    )
