"""The script of a report: reads charts at a moment, and rectangles with the keyboard. The page works without it."""

from __future__ import annotations

__all__ = ["SCRIPT"]

SCRIPT = """
"use strict";
(() => {
  const page = document.documentElement;
  page.classList.add("js");

  // Ties are rounded as Python rounds them.
  const hundredths = new Intl.NumberFormat("en",
    { minimumFractionDigits: 2, maximumFractionDigits: 2, roundingMode: "halfEven", useGrouping: false });
  const human = count => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
    return (unit ? hundredths.format(count) : count) + " " + units[unit];
  };

  for (const figure of document.querySelectorAll("figure[data-series]")) {
    const series = JSON.parse(document.getElementById(figure.dataset.series).textContent);
    const [plot, slider, reading, cursor] =
      [".plot", "input", "output", ".cursor"].map(name => figure.querySelector(name));
    const show = () => {
      const at = Number(slider.value);
      const held = series.kinds.filter(kind => kind.bytes[at]);
      const total = held.reduce((sum, kind) => sum + kind.bytes[at], 0);
      const head = `${series.phases[at]}, moment ${series.moments[at].toLocaleString("en")}: ${human(total)}`;
      reading.replaceChildren();
      const add = (text, key, count) => {
        const item = document.createElement(key ? "span" : "b");
        if (key) item.innerHTML = '<i class="swatch k-' + key + '"></i>';
        item.append(text);
        if (count !== undefined) item.title = count.toLocaleString("en") + " bytes";
        reading.append(item);
      };
      add(head, "", total);
      for (const kind of held) add(`${kind.name} ${human(kind.bytes[at])}`, kind.key, kind.bytes[at]);
      slider.setAttribute("aria-valuetext", [...reading.children].map(item => item.textContent).join(", "));
      cursor.style.left = 100 * series.moments[at] / (series.last + 1) + "%";
      cursor.style.bottom = 100 * total / series.top + "%"; // a line across the curve would hide a narrow peak
      cursor.hidden = false;
    };
    slider.addEventListener("input", show);
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect();
      const moment = (event.clientX - box.left) / box.width * (series.last + 1);
      const later = series.moments.findIndex(found => found >= moment);
      slider.value = later < 0 ? series.moments.length - 1 : later;
      show();
    });
    show();
  }

  for (const group of document.querySelectorAll(".cells")) {
    const cells = [...group.querySelectorAll("[tabindex]")];
    const told = group.parentElement.querySelector(".told");
    const tell = event => {
      const cell = event.target.closest("[title]");
      if (cell && group.contains(cell)) told.textContent = cell.title;
    };
    if (cells.length) cells[0].tabIndex = 0;
    group.addEventListener("pointerover", tell);
    group.addEventListener("focusin", tell);
    group.addEventListener("keydown", event => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      const here = cells.indexOf(document.activeElement);
      const next = event.key === "Home" ? 0 : event.key === "End" ? cells.length - 1 : here + steps[event.key];
      if (here < 0 || !cells[next]) return;
      event.preventDefault();
      cells[here].tabIndex = -1;
      cells[next].tabIndex = 0;
      cells[next].focus();
    });
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(item => { item.open = true; }));
})();
"""
