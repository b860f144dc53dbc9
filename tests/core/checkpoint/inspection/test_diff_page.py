"""The page about two checkpoints shows each module that differs, by how much; names are text, whatever they hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmfsdp.checkpoint import TargetExistsError, diff, diff_page, write_page

pytest.importorskip("numpy")


class Reader(HTMLParser):
    """Checks that tags match, and collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.stack else ""


def page_of(folder: Path, one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> tuple[str, Reader]:
    save_file(one, folder / "a.safetensors")
    save_file(two, folder / "b.safetensors")
    page = diff_page(diff(folder / "a.safetensors", folder / "b.safetensors", histogram=True))
    return page, Reader(page)


def test_shows_modules_shares_and_sizes(tmp_path: Path) -> None:
    one = {f"layers.{index}.{name}.weight": torch.ones(10, 10) for index in range(3) for name in ("q", "k")}
    two = {name: tensor.clone() for name, tensor in one.items()}
    two["layers.1.q.weight"][:, :3] = 1.25
    two["layers.2.k.weight"][0, 0] = 0.0
    two["new"] = torch.ones(1)
    page, read = page_of(tmp_path, one, two)
    assert "31 of 600 elements differ (5.2\u00a0%)" in read.text
    assert "<h1>Different: 2 of 6 tensors, 1 in one only</h1>" in page
    assert re.search(r"4\s+tensors equal.*2\s+tensors changed.*1\s+only in B", read.text)
    rows = dict(re.findall(r'<span class="name">(\S+?)(?: <small>.*?</small>)?</span><span class="(\w+)">', page))
    assert rows["0."] == "same"
    assert {rows[name] for name in ("layers.", "1.", "2.")} == {"share"}
    assert "30.0\u00a0%" in read.text
    assert "largest |A\u00a0\u2212\u00a0B|\u00a0/\u00a0|B| infinite" in read.text
    assert not {tag for tag, _ in read.tags} & {"script", "link", "img", "iframe"}
    assert not [attrs for _, attrs in read.tags if {"src", "href"} & {*attrs}]
    assert "prefers-color-scheme: dark" in page


def test_the_histogram_counts_decades_relative_to_the_second(tmp_path: Path) -> None:
    base = torch.full((8,), 2.0, dtype=torch.float64)
    changes = torch.tensor([0.0, 1e-9, 3e-8, 5e-4, 2e-1, 3.0, 10.0, 1e5], dtype=torch.float64)
    save_file({"w": base * (1 + changes)}, tmp_path / "a")
    save_file({"w": base}, tmp_path / "b")
    [item] = diff(tmp_path / "a", tmp_path / "b", histogram=True).values
    assert item.decades == (1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 2)
    assert sum(item.decades) == item.differing == 7
    [plain] = diff(tmp_path / "a", tmp_path / "b").values
    assert plain.decades == ()


def test_names_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&\"'.weight"
    page, read = page_of(tmp_path, {name: torch.ones(1), "a" + ".b" * 500: torch.ones(1)}, {name: torch.zeros(1)})
    assert "<script" not in page
    assert name in read.text


def test_equal_checkpoints(tmp_path: Path) -> None:
    _, read = page_of(tmp_path, {"a.b": torch.ones(2)}, {"a.b": torch.ones(2)})
    assert "The same: 1 tensor" in read.text
    assert "0 of 2 elements differ (0\u00a0%)" in read.text


def test_is_written_whole_and_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page("<p>one", path)
    with pytest.raises(TargetExistsError):
        write_page("<p>two", path)
    write_page("<p>two", path, overwrite=True)
    assert path.read_text() == "<p>two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_replaces_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "epoch_1").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "epoch_1" / "model.safetensors")
    before = (tmp_path / "epoch_1" / "model.safetensors").read_bytes()
    for path, kind in ((tmp_path / "epoch_1", "directory"), (tmp_path / "epoch_1" / "model.safetensors", "file")):
        with pytest.raises(TargetExistsError, match=f"is a {kind}, and only another page would be replaced"):
            write_page("<p>", path, overwrite=True)
    assert (tmp_path / "epoch_1" / "model.safetensors").read_bytes() == before
