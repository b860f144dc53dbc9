"""Puts HTML into one self-contained page, with the frame and the style that all pages share. It needs no torch."""

from __future__ import annotations

from html import escape

__all__ = ["html_page"]


def html_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a page of HTML that loads nothing, for light and dark, phones, wide screens and paper.

    Args:
        title: The title, as text.
        body: What the page shows, as HTML.
        style: Rules of CSS after those that all pages share.
        script: JavaScript that runs when the page is there. Without it, the page allows no script at all.
    """
    allowed = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if script else "")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{style}</style>",
    ]
    end = f"\n<script>{script}</script>" if script else ""
    lines = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body><main>", body, f"</main>{end}"]
    return "\n".join([*lines, "</body>", "</html>", ""])


# The dark theme is one of screens: paper is white. What `.fit` holds is shown whole or not at all: a name that is wider
# wraps to a second line, which is hidden.
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #566272; --line: #dde2e8; --page: #fff; --soft: #f4f6f8;
  --mark: #2868c8; --good: #1a7340; --warn: #a04a00; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #9aa5b3; --line: #323a45;
  --page: #14181d; --soft: #1d232a; --mark: #6ea8ff; --good: #5ccb8a; --warn: #ffb06a; } }
@media print { :root { color-scheme: light; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  print-color-adjust: exact; overflow-wrap: break-word; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: clamp(1.1rem, 4.8cqw, 1.6rem); line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: .8rem 0 .3rem; }
header p { margin: .4rem 0 0; color: var(--dim); } header p b, header code { color: var(--ink); }
.good h1 { color: var(--good); } .bad h1 { color: var(--warn); }
.good h1::before { content: "\\2713\\a0"; } .bad h1::before { content: "\\2717\\a0"; }
code, pre, .name { font: .9em ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-radius: .3rem; background: var(--soft); padding: .5rem; }
small, footer, .note { color: var(--dim); } footer { margin-top: 2rem; }
:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
summary { cursor: pointer; }
.fit { display: flex; flex-wrap: wrap; overflow: hidden; white-space: nowrap; }
.fit::before { content: ""; height: 100%; }
.cards { display: grid; grid-template-columns: repeat(6, 1fr); gap: .5rem; list-style: none; padding: 0;
  margin: 1rem 0; }
.cards li { background: var(--soft); border-radius: .5rem; padding: .5rem .9rem; color: var(--dim); }
.cards b { display: block; font-size: 1.3rem; color: var(--ink); line-height: 1.3; }
@container (max-width: 56rem) { .cards { grid-template-columns: repeat(3, 1fr); } }
@container (max-width: 26rem) { .cards { grid-template-columns: 1fr 1fr; } }
main, .pair > div { container-type: inline-size; }
.row { display: grid; gap: .2rem 1rem; align-items: baseline; padding: .3rem .5rem;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
.row > :not(:first-child) { text-align: right; } data { white-space: nowrap; }
.name small { font-family: system-ui, sans-serif; white-space: nowrap; }
.head { color: var(--dim); font-size: .85rem; align-items: end; }
.label { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
summary.row .name::before { content: "\\25b8\\a0"; color: var(--dim); }
details[open] > summary.row .name::before { content: "\\25be\\a0"; }
details > .row:not(summary), details > details { margin-left: 1rem; }
.share { display: flex; align-items: baseline; gap: .5rem; }
.share i { flex: 0 1 5rem; margin-right: auto; height: .6rem; background: var(--line); border-radius: .3rem;
  overflow: hidden; }
.share i b { display: block; height: 100%; background: var(--mark); }
@container (max-width: 46rem) { .row { display: block; } .head, .row > :empty { display: none; }
  .row > :not(.name) { display: flex; align-items: baseline; gap: .5rem; text-align: left; }
  .label { position: static; flex: 0 0 9rem; height: auto; clip-path: none; } .share i { order: 1; margin: 0 0 0 auto; }
  details > .row:not(summary), details > details { margin-left: .6rem; } }
.wide { overflow-x: auto; } .tables { display: flex; flex-wrap: wrap; gap: 0 3rem; }
table { border-collapse: collapse; min-width: min(24rem, 100%); margin: .5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); font-size: .85rem; padding: .2rem 0; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); font-weight: 400;
  vertical-align: baseline; }
thead th { color: var(--dim); font-size: .85rem; vertical-align: bottom; }
td small { display: inline-block; min-width: 4rem; }
.num { text-align: right; }
:is(th, td):last-child { padding-right: 0; }
@container (max-width: 40rem) { table { font-size: .8rem; } th, td { padding-right: .5rem; }
  td small { min-width: 0; } }
@container (min-width: 40rem) { th:has(.swatch) { white-space: nowrap; } }
@media print { section { break-inside: avoid-page; } }
"""
