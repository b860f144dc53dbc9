"""Errors name a pip line that works for the copy of mmfsdp that raises them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mmfsdp.basics.installing import ON_INDEX, REPOSITORY, pip_install, requirement

CHECKOUT = {"url": "file:///home/me/my%20clone/packages/core", "dir_info": {"editable": True}}
GIT = {"url": "ssh://git@host/x.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}
WHEEL = {"url": "file:///tmp/mmfsdp-0.1.0-py3-none-any.whl", "archive_info": {}}


def test_from_a_clone() -> None:
    assert requirement("mmfsdp[torch]", CHECKOUT) == "/home/me/my clone/packages/core[torch]"
    assert requirement("mmfsdp-mmengine", CHECKOUT) == "/home/me/my clone/packages/mmengine_adapter"


def test_from_git() -> None:
    assert (
        requirement("mmfsdp[torch]", GIT) == "mmfsdp[torch] @ git+ssh://git@host/x.git@1a2b#subdirectory=packages/core"
    )
    assert requirement("mmfsdp-cli", GIT) == "mmfsdp-cli @ git+ssh://git@host/x.git@1a2b#subdirectory=packages/cli"


@pytest.mark.parametrize("origin", [None, WHEEL])
def test_from_elsewhere(origin: dict[str, object] | None) -> None:
    assert requirement("mmfsdp[numpy]", origin) == f"mmfsdp[numpy] @ git+{REPOSITORY}#subdirectory=packages/core"
    assert requirement("s3fs", origin) == "s3fs"


def test_the_command_names_what_pip_finds() -> None:
    command = pip_install("mmfsdp[numpy]", "s3fs")
    assert command.startswith("pip install ")
    assert command.endswith(" s3fs")
    if not ON_INDEX:
        assert "packages/core" in command
    assert pip_install("s3fs", upgrade=True) == "pip install --upgrade s3fs"


def test_pip_accepts_the_command() -> None:
    """pip reads each requirement; it resolves and installs nothing here."""
    words = re.findall(r"'([^']+)'|(\S+)", pip_install("mmfsdp[torch]", "mmfsdp-mmengine[mmengine]", "mmfsdp-cli"))[2:]
    code = (
        "import sys\n"
        "from pip._internal.req.constructors import install_req_from_line\n"
        "for line in sys.argv[1:]:\n"
        "    found = install_req_from_line(line)\n"
        "    assert found.link, line\n"
    )
    lines = [quoted or plain for quoted, plain in words]
    assert len(lines) == 3
    done = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
