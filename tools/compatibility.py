"""Writes docs/reference/compatibility.md: which releases of torch, Python, MMEngine and transformers are tested.

``python tools/compatibility.py`` reads the sessions from noxfile.py, pins and bounds from the packages' metadata and
the requirements, and dates and results from tools/releases.toml, where they are kept by hand.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "page"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"


def page() -> str:
    """Return the page as it should be."""
    dates = tomllib.loads(_read("tools/releases.toml"))
    core = tomllib.loads(_read("packages/core/pyproject.toml"))["project"]
    extras = tomllib.loads(_read("packages/mmengine_adapter/pyproject.toml"))["project"]["optional-dependencies"]
    return HEAD + "\n".join(
        [
            "## Python\n",
            f"`requires-python` is `{core['requires-python']}`.\n",
            _table(("Python", "released", "security fixes end"), _pythons(core, dates["python"])),
            "## torch\n",
            f"The extra `mmfsdp[torch]` requires `{_requirement(core['optional-dependencies']['torch'], 'torch')}`.\n",
            _table(("torch", "released", "tested by"), _torch(dates["torch"])),
            UNKNOWN_TORCH,
            _table(("torch", "Python", "tests", "result"), map(_run, dates["runs"])),
            RUNS,
            "## MMEngine\n",
            _table(("distribution", "required", "newest tested", "released"), _mmengine(extras, dates)),
            MMENGINE.format(oldest="0.9.0", date=dates["mmengine"]["0.9.0"]),
            "## transformers\n",
            _table(("transformers", "released", "tested by"), _transformers(dates["transformers"])),
            TRANSFORMERS,
        ]
    )


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _table(header: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _requirement(requirements: list[str], name: str) -> str:
    return next(item for item in requirements if re.match(rf"{name}(?![\w-])", item))


def _pinned(name: str) -> str:
    found = re.search(rf"^{name}==(.*)$", _read("constraints.txt"), re.MULTILINE)
    assert found is not None, name
    return found[1]


def _pythons(project: dict[str, Any], dates: dict[str, Any]) -> list[tuple[str, ...]]:
    versions = [item.rpartition(" :: ")[2] for item in project["classifiers"] if "Python :: 3." in item]
    return [(version, *dates[version]) for version in versions]


def _torch(dates: dict[str, Any]) -> list[tuple[str, ...]]:
    named = re.search(r"^RELEASES = \((.*)\)$", _read("noxfile.py"), re.MULTILINE)
    assert named is not None
    pinned = _pinned("torch")
    sessions = {release: f"`nox -s 'compat({release})'`" for release in [*re.findall(r'"([\d.]+)"', named[1]), pinned]}
    sessions[pinned] = "`nox -s tests exhaustive`, with every change"
    return [(release, date, sessions.get(release, "the runs below")) for release, date in dates.items()]


def _run(run: dict[str, str]) -> list[str]:
    return [run[key] for key in ("torch", "python", "tests", "result")]


def _mmengine(extras: dict[str, list[str]], dates: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for extra, requirements in extras.items():
        name = re.split(r"[>=]", requirements[0])[0]
        newest, date = [*dates[name].items()][-1]
        rows.append((f"`{name}`", f"`{requirements[0]}`, the extra `{extra}`", newest, date))
    return rows


def _transformers(dates: dict[str, Any]) -> list[tuple[str, ...]]:
    required = _requirement(_read("requirements-models.txt").splitlines(), "transformers").removeprefix(
        "transformers>="
    )
    oldest, pinned = next(iter(dates)), _pinned("transformers")
    assert oldest.startswith(required), f"tools/releases.toml lacks transformers {required}"
    return [
        (oldest, dates[oldest], "no session: the lower bound of the tests' requirements"),
        (pinned, dates[pinned], "`nox -s tests exhaustive models`"),
    ]


HEAD = """\
# Compatibility

On this page you look up which releases of Python, torch, MMEngine and transformers mmfsdp runs with, which of them are
tested, and how old they are. `python tools/compatibility.py` writes it, from the sessions of `noxfile.py`, the
packages' metadata, and dates of PyPI and python.org in `tools/releases.toml`. How long a release stays supported is
part of [stability](stability.md).

"""

UNKNOWN_TORCH = """\
If the installed torch is newer than the newest one in the table, the plan says so in its notes. If it has changed where
mmfsdp relies on it, `shard()` raises an `UnknownTorchError` instead of training strangely.

We ran the tests on 2026-11-22 and 23, on the CPU with gloo and MMEngine 0.10.7:
"""

RUNS = """\
Some tests failed at first on 2.10.0, 2.12.1, 2.13.0 with Python 3.13 and 3.14, and 2.14.1 with Python 3.13. We
corrected these tests and ran them again on their own, not the whole suite. Three failures could not be repeated:

- On 2.9.1 a rank ended with a segmentation fault inside torch, in one of four runs of all tests, and in none of 18 more
  runs of the 56 tests of that file.
- On 2.14.1 with Python 3.13, one load by torch's DCP on four ranks hung, once in five runs.
- On 2.10.0 and 2.11.0, on a busy machine, up to two tests failed that passed on their own.

The tests that need two hosts were not run with Python 3.14, and those that need a GPU on 2.11.0 only. On 2.11 and
2.12 a second save in the background raised `KeyError` until 2026-11-26: torch's own stager empties itself there.
"""

MMENGINE = """\
`nox -s distributions` runs the adapter's tests beside each of the three; [install](../howto/install.md#which-mmengine)
says which one to choose. Checkpoints and configs of older releases also load: a test resumes what MMEngine {oldest}
({date}) to 0.10.7 wrote, sharded on two ranks.
"""

TRANSFORMERS = """\
mmfsdp does not require transformers. It accepts its models as it accepts any other, and reads and writes its
[folders](../howto/huggingface.md).
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
