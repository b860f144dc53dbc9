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


# The dark theme is one of screens: paper is white.
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #566272; --line: #dde2e8; --page: #fff; --soft: #f4f6f8;
  --mark: #2868c8; --warn: #a04a00; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #9aa5b3; --line: #323a45;
  --page: #14181d; --soft: #1d232a; --mark: #6ea8ff; --warn: #ffb06a; } }
@media print { :root { color-scheme: light; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  print-color-adjust: exact; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
small, footer, .note { color: var(--dim); } footer { margin-top: 2rem; }
:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
.cards { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0; }
.cards li { background: var(--soft); border-radius: .5rem; padding: .5rem .9rem; color: var(--dim); }
.cards b { display: block; font-size: 1.4rem; color: var(--ink); line-height: 1.2; }
.row { display: grid; gap: .2rem 1rem; align-items: center; padding: .3rem .5rem;
  border-bottom: 1px solid var(--line); }
.head { color: var(--dim); font-size: .85rem; }
.name { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.name small { font-family: system-ui, sans-serif; white-space: nowrap; }
summary.row { cursor: pointer; } summary.row .name::before { content: "\\25b8\\a0"; color: var(--dim); }
details[open] > summary.row .name::before { content: "\\25be\\a0"; }
details > .row:not(summary), details > details { margin-left: 1rem; }
.share i { display: inline-block; width: 6rem; height: .6rem; background: var(--line); border-radius: .3rem;
  overflow: hidden; }
.share i b { display: block; height: 100%; background: var(--mark); }
@media (max-width: 48rem) { .head { display: none; } .row .name { grid-column: 1 / -1; } .share i { width: 4rem; }
  .row span:empty { display: none; } }
"""
