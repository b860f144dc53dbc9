"""Pages in headless Chromium: at three widths and in two themes they fit, are legible, and answer the keyboard."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.pages.browser import found_in
from torch import nn

import mmfsdp
from mmfsdp.basics import human_bytes
from mmfsdp.checkpoint import diff, diff_page
from mmfsdp.parity import Key, comparison_page
from mmfsdp.parity.comparing.comparison import Compared, Comparison, Difference
from mmfsdp.rehearsal import Rehearsal, report
from mmfsdp.rehearsal.timing.device_names import device_of

WIDTHS = (380, 800, 1400)  # of a phone, a tablet and a screen
THEMES = ("light", "dark")
COUNTS = (1, 2)
LONG = "layers.{}.a_normalization_layer.weight"

# What the page that holds the report looks at, in frames of three widths and two themes.
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
const seen = node => node.checkVisibility() && node.getClientRects().length;
const looked = frame => {
  const page = frame.contentDocument, view = frame.contentWindow, found = {};
  const all = [...page.querySelectorAll("main *")], box = node => node.getBoundingClientRect();
  view.dispatchEvent(new view.Event("beforeprint"));
  found.closed = page.querySelectorAll("details:not([open])").length;
  page.querySelectorAll("details").forEach(node => { node.open = true; });
  found.overflow = page.documentElement.scrollWidth - view.innerWidth;
  found.width = view.innerWidth;
  found.dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
  found.first = page.querySelector("main").innerText.trim().split("\\n")[0].trim();
  found.title = page.querySelector("h1").innerText.trim();
  const hasText = node => [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim());
  const told = all.filter(node => seen(node) && hasText(node));
  found.dim = told.filter(node => contrast(node) < 4.5)
    .map(node => `${node.tagName} ${node.className} ${node.textContent.slice(0, 40)} ${contrast(node)}`);
  // <wbr> divides text nodes: none of what is left breaks.
  found.broken = all.filter(node => node.matches("code, .name, h3, header b") && seen(node)).flatMap(node => {
    const texts = page.createTreeWalker(node, 4), many = [], range = page.createRange();
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
      range.selectNodeContents(text);
      const lines = new Set([...range.getClientRects()].map(rect => rect.top));
      if (!/\\s/.test(text.data.trim()) && lines.size > 1) many.push(text.data);
    }
    return many;
  });
  // What fits is shown whole, and what does not fit is not shown.
  found.cut = [...page.querySelectorAll(".fit > span")].filter(node => seen(node) && box(node).width)
    .filter(node => box(node).top < box(node.parentElement).bottom - 1
      && (box(node).right > box(node.parentElement).right + 1 || box(node).bottom > box(node.parentElement).bottom + 1))
    .map(node => node.textContent);
  found.outside = told.filter(node => !node.closest(".fit, .label"))
    .filter(node => box(node).left < -1 || box(node).right > view.innerWidth + 1)
    .map(node => node.textContent.slice(0, 40));
  found.peaks = [...page.querySelectorAll(".peak")].map(node => [node, ...node.children].every(one => {
    const [inner, outer] = [box(one), box(node.parentElement)];
    return inner.width && inner.top > outer.top - 12 && inner.left > outer.left - 12 && inner.right < outer.right + 12;
  }));
  if (page.querySelector(".treemap")) report(page, view, found);
  return found;
};
const report = (page, view, found) => {
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
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    try { return looked(frame); } catch (error) { return { error: String(error) }; }
  });
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


@pytest.fixture(scope="module")
def opened(steps: list[Rehearsal], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Return what `LOOK` finds, by page and theme, at each width: one browser opens them all."""
    folder = tmp_path_factory.mktemp("pages")
    names = ["configs/keeps_activations.json", "configs/recomputes_them.json"]
    pages = {f"report {count}": report(*steps[:count], names=names[:count]) for count in COUNTS}
    pages |= {"diff": page_of_diff(folder), "compare": page_of_compare()}
    keys = [(page, theme) for page in pages for theme in THEMES]
    frames = [
        f'<iframe style="width:{width}px;height:900px;border:0;color-scheme:{theme}" srcdoc="{escape(pages[page])}">'
        "</iframe>"
        for page, theme in keys
        for width in WIDTHS
    ]
    looks = iter(found_in(frames, LOOK, folder / "host.html"))
    return {key: [next(looks) for _ in WIDTHS] for key in keys}


def page_of_diff(folder: Path) -> str:
    one = {f"model.{LONG.format(index)}": torch.ones(8, 8) for index in range(3)}
    two = {name: torch.full((8, 8), 1 + 10.0**-index) for index, name in enumerate(one)}
    save_file({**one, "model.only_in_the_first": torch.ones(1)}, folder / "a_checkpoint.safetensors")
    save_file(two, folder / "another_checkpoint.safetensors")
    paths = (folder / "a_checkpoint.safetensors", folder / "another_checkpoint.safetensors")
    return diff_page(diff(*paths, histogram=True))


def page_of_compare() -> str:
    figures = [(0.0, 1e-3), (2e-4, 1e-3), (2e-1, 1e-3)]
    keys = [Key(0, "gradient", LONG.format(index), 0) for index in range(3)]
    compared = [Compared(key, far, limit, differs=far > limit) for key, (far, limit) in zip(keys, figures, strict=True)]
    found = [Difference(keys[2], 0.2, 1e-3, 1.0, 1.2, "a factor of 1.2", (), None)]
    return comparison_page(Comparison("records/of_one_process", "records/of_two_ranks", (1, 2), compared, found))


def check(found: dict[str, Any], width: int, theme: str) -> None:
    assert "error" not in found, found["error"]
    assert found["width"] == width
    assert found["dark"] is (theme == "dark")
    assert found["first"] == found["title"], "the verdict is what a reader sees and hears first"
    assert found["overflow"] <= 0
    assert [found[name] for name in ("dim", "broken", "cut", "outside")] == [[]] * 4
    assert all(found["peaks"])


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("page", "title"),
    [("diff", "Different: 3 of 3 tensors, 1 in one only"), ("compare", "Different: 1 of 3 tensors")],
)
def test_pages_of_diff_and_compare(opened: dict[tuple[str, str], Any], page: str, title: str, theme: str) -> None:
    for found, width in zip(opened[page, theme], WIDTHS, strict=True):
        check(found, width, theme)
        assert found["title"] == title


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_report(steps: list[Rehearsal], opened: dict[tuple[str, str], Any], theme: str, count: int) -> None:
    for found, width in zip(opened[f"report {count}", theme], WIDTHS, strict=True):
        check(found, width, theme)
        assert found["title"] == steps[0].verdict(device_of("h100").memory)
        assert len(found["peaks"]) == count
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
