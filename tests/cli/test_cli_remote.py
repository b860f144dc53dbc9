"""The commands that read, with URLs: a web server on this machine, and none of the libraries for stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.support import golden, invoke, run
from tests.core.web_server import WebServer, serving


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "served").mkdir()
    golden("epoch_3.pth", tmp_path / "served")
    golden("dcp", tmp_path / "served")
    with serving(tmp_path / "served") as web:
        yield web


@pytest.mark.sample("epoch_3.pth")
@pytest.mark.parametrize("name", ["epoch_3.pth", "dcp"])
def test_commands_take_urls(name: str, web: WebServer, tmp_path: Path) -> None:
    url, out = f"{web.url}/{name}?token=hush", tmp_path / "out.safetensors"
    done = [run("inspect", url), run("convert", url, out), run("verify", url), run("diff", url, out)]
    assert [one.returncode for one in done] == [0] * 4
    said = "".join(one.stderr for one in done)
    assert not [line for line in said.splitlines() if " %  " not in line]  # progress, on a slow machine
    assert not [one.stdout for one in done if "hush" in one.stdout]
    assert f"{web.url}/{name}?...: ok" in done[2].stdout
    assert all(request.path.endswith("?token=hush") for request in web.requests)


def test_what_is_not_there(web: WebServer) -> None:
    result = invoke("verify", f"{web.url}/epoch_4.pth?token=hush")
    assert result.exit_code == 2
    assert f"There is no checkpoint at '{web.url}/epoch_4.pth?...'. Check its spelling." in result.stderr
    assert "hush" not in result.stderr


@pytest.mark.parametrize("scheme", ["https", "gs"])  # whether gcsfs is installed or not
def test_targets_that_cannot_be_written(scheme: str, tmp_path: Path) -> None:
    result = invoke("convert", golden("epoch_3.pth", tmp_path), f"{scheme}://host/out.safetensors")
    assert result.exit_code == 2
    assert "targets are paths on this machine, and s3://" in " ".join(result.stderr.split())
