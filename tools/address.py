"""Writes the address of the repository, REPOSITORY of mmfsdp/basics/installing.py, into the files that state it.

    python tools/address.py

These are the packages' metadata, CITATION.cff and the choice of forms for issues. Until REPOSITORY is set, none of them
states an address.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmfsdp.basics.installing import FOLDERS, REPOSITORY

__all__ = ["FILES", "ROOT", "state_address"]

ROOT = Path(__file__).parents[1]
UNKNOWN = "URL"
PROJECTS = [ROOT / folder / "pyproject.toml" for folder in FOLDERS.values()]
CITATION = ROOT / "CITATION.cff"
CHOICE = ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"
FILES = [*PROJECTS, CITATION, CHOICE]


def state_address(path: Path, address: str) -> str:
    """Return the text of one of the files with an address of the repository.

    Args:
        path: One of `FILES`.
        address: Such as ``https://github.com/owner/name``. ``URL`` stands for none.
    """
    text, known = path.read_text(encoding="utf-8"), address != UNKNOWN
    if path == CITATION:
        text = re.sub(r"^repository-code:.*\n", "", text, flags=re.MULTILINE)
        return text + f"repository-code: {address}\n" * known
    if path == CHOICE:
        return "blank_issues_enabled: true\n" + CONTACTS.format(address) * known
    table, before = re.compile(r"^\[project\.urls\]\n(?:.+\n)*\n", re.MULTILINE), "[tool.hatch.build.targets.wheel]"
    return table.sub("", text).replace(before, URLS.format(address) * known + before, 1)


URLS = """\
[project.urls]
Repository = "{0}"
Issues = "{0}/issues"
Changelog = "{0}/blob/main/CHANGELOG.md"
Documentation = "{0}/blob/main/docs/index.md"

"""

CONTACTS = """\
contact_links:
  - name: A vulnerability
    about: Report it in private
    url: {0}/security/advisories/new
  - name: What an error means
    about: Troubleshooting, by the text of the error
    url: {0}/blob/main/docs/howto/troubleshooting.md
"""


if __name__ == "__main__":
    for file in FILES:
        file.write_text(state_address(file, REPOSITORY), encoding="utf-8")
