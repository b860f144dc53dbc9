"""Pages in headless Chromium: they fit phones and wide screens, are legible in both themes, and answer the keyboard."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pages.browser import DARK, run
from torch import nn

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.rehearsal import Rehearsal, report

# What the page that holds the report looks at, in frames of three widths.
LOOK = """
const channel = value => (value /= 255) <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
const colour = text => text.match(/[\\d.]+/g).map(Number);
const behind = node => {
  for (; node; node = node.parentElement) {
    const found = colour(node.ownerDocument.defaultView.getComputedStyle(node).backgroundColor);
    if (found.length < 4 || found[3]) return found;
  }
  return [255, 255, 255];
};
const contrast = node => {
  const one = light(colour(node.ownerDocument.defaultView.getComputedStyle(node).color)), two = light(behind(node));
  return (Math.max(one, two) + .05) / (Math.min(one, two) + .05);
};
const looked = frame => {
  const page = frame.contentDocument, view = frame.contentWindow, found = {};
  found.overflow = page.documentElement.scrollWidth - view.innerWidth;
  found.dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
  const told = [...page.querySelectorAll("p, td, th, small, summary, .told, .legend li, .cell span, caption, footer")];
  found.dim = told.filter(node => node.textContent.trim() && contrast(node) < 4.5)
    .map(node => `${node.tagName} ${node.className} ${node.textContent.slice(0, 40)} ${contrast(node)}`);
  found.thin = [...page.querySelectorAll(".outline .name")].filter(node => node.offsetWidth && node.offsetWidth < 120)
    .map(node => node.textContent);
  const cells = [...page.querySelectorAll(".treemap .cell")];
  found.areas = cells.map(cell => [Number(cell.dataset.bytes), cell.offsetWidth * cell.offsetHeight]);
  found.readings = [...page.querySelectorAll("figure[data-series]")].map(figure => {
    const slider = figure.querySelector("input"), read = [];
    for (const at of [0, Number(slider.max)]) {
      slider.value = at;
      slider.dispatchEvent(new view.Event("input"));
      read.push([slider.getAttribute("aria-valuetext"), figure.querySelector("output").textContent]);
    }
    return read;
  });
  const map = page.querySelector(".treemap"), press = key =>
    page.activeElement.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
  cells[0].focus();
  const titles = [cells[0].title, page.activeElement.title, map.nextElementSibling.textContent];
  press("ArrowRight");
  titles.push(page.activeElement.title, map.nextElementSibling.textContent);
  press("End");
  found.keys = [...titles, page.activeElement.title];
  found.groups = [...page.querySelectorAll(".cells")].map(group => {
    const cell = group.querySelector("[tabindex]");
    cell.focus();
    return [cell.title, group.parentElement.querySelector(".told").textContent, cell.tabIndex];
  });
  found.stops = cells.filter(cell => cell.tabIndex === 0).length;
  view.dispatchEvent(new view.Event("beforeprint"));
  found.closed = page.querySelectorAll("details:not([open])").length;
  return found;
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(looked);
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def steps() -> list[Rehearsal]:
    with torch.device("meta"):
        model = nn.Transformer(64, 4, 3, 3, 256, batch_first=True)
        batch = (torch.empty(4, 32, 64), torch.empty(4, 32, 64))
    config: dict[str, Any] = {"precision": "bf16"}
    full = {**config, "activation_checkpointing": {"mode": "full"}}
    return [mmfsdp.rehearse(given, model, batch, mesh=16) for given in (config, full)]


def opened(page: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Return what `LOOK` finds in a page, in frames as wide as a phone, a tablet and a screen."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page)}"></iframe>'
        for width in (390, 820, 1440)
    )
    host = folder / "host.html"
    host.write_text(f'<!doctype html><pre id="found"></pre>{frames}<script>{LOOK}</script>', encoding="utf-8")
    shown = run(host, *flags, "--dump-dom")
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, flags=re.DOTALL)
    assert found is not None
    assert found[1]
    looked: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return looked


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_report(steps: list[Rehearsal], tmp_path: Path, theme: str, count: int) -> None:
    page = report(*steps[:count])
    looks = opened(page, tmp_path, *(DARK if theme == "dark" else ()))
    assert len(looks) == 3
    for found in looks:
        assert found["dark"] is (theme == "dark")
        assert found["overflow"] <= 0
        assert found["dim"] == []
        assert found["thin"] == []
        assert found["closed"] == 0
        assert found["stops"] == count
        first, focused, told, second, told_second, last = found["keys"]
        assert first == focused == told
        assert second == told_second
        assert len({first, second, last}) == 3
        assert len(found["groups"]) == 2 * count + 1
        assert all(title == told for title, told, _ in found["groups"])
        for step, (begin, end) in zip(steps, found["readings"], strict=False):
            timeline = step.timeline(180)
            for (spoken, shown), (_, counts) in zip((begin, end), (timeline[0], timeline[-1]), strict=True):
                assert human_bytes(sum(counts.values())) in spoken
                for kind, nbytes in counts.items():
                    assert f"{kind} {human_bytes(nbytes)}" in shown
        large = [(nbytes, area) for nbytes, area in found["areas"] if area > 4000]
        assert len(large) >= 2
        rates = sorted(area / nbytes for nbytes, area in large)
        assert rates[-1] / rates[0] < 1.6, "titles and borders take a part of the areas, but no more"
