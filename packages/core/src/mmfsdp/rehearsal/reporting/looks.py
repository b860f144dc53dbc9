"""Gives kinds of memory colours with patterns in charts over time, and patterns alone where colours are modules."""

from __future__ import annotations

from collections.abc import Iterable

from mmfsdp.basics.pages.markup import text

__all__ = ["STYLE", "key_of", "legend", "patterns", "texture_of"]

# Colours that people with any colour vision can tell apart (Okabe and Ito, "Color Universal Design", 2008). Kinds that
# belong together share one, and differ in their pattern.
_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PURPLE, _GREY = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#9aa0a6",
)
_LOOKS: dict[str, tuple[str, str]] = {
    "parameter": (_BLUE, "plain"),
    "optimizer state": (_BLUE, "striped"),
    "ema": (_BLUE, "dotted"),
    "buffer": (_GREY, "plain"),
    "input": (_GREY, "striped"),
    "gradient": (_RED, "plain"),
    "gathered": (_GREEN, "plain"),
    "reduce buffer": (_GREEN, "striped"),
    "activation": (_ORANGE, "plain"),
    "recomputed": (_ORANGE, "striped"),
    "activation gradient": (_PURPLE, "plain"),
    "optimizer temporary": (_SKY, "plain"),
}
_OTHER = "other"
_HORIZONTAL, _FALLING, _VERTICAL, _RISING = 0, 45, 90, 135  # degrees across the lines
_LINES: dict[str, tuple[int, float, int]] = {  # direction, width and distance in pixels
    "parameter": (_HORIZONTAL, 1.5, 7),
    "buffer": (_HORIZONTAL, 3, 8),
    "optimizer state": (_RISING, 1.5, 7),
    "optimizer temporary": (_RISING, 1.5, 4),
    "input": (_VERTICAL, 3, 8),
    "gradient": (_FALLING, 1.5, 4),
    "activation gradient": (_FALLING, 1.5, 9),
    "gathered": (_VERTICAL, 1.5, 7),
    "reduce buffer": (_VERTICAL, 1.5, 4),
}
_DOTS = {"ema": 5, "recomputed": 9}  # their distance in pixels
"""Patterns without colours. What has neither lines nor dots is plain: activations, usually the most."""
_MARKS = {
    "striped": '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke="#000" stroke-opacity=".45" stroke-width="1.6"/>',
    "dotted": '<circle cx="4" cy="4" r="1.6" fill="#000" fill-opacity=".5"/>',
    "crossed": '<path d="M0 0l8 8M0 8l8-8" stroke="#000" stroke-opacity=".4"/>',
}


def key_of(kind: str) -> str:
    """Return what names a kind in classes and patterns; kinds without a look share one."""
    return kind.replace(" ", "-") if kind in _LOOKS else _OTHER


def texture_of(kind: str) -> str:
    """Return what names the pattern of a kind in classes, where colours mean something else."""
    return kind.replace(" ", "-") if kind in _LINES or kind in _DOTS else "plain"


def patterns() -> str:
    """Return the patterns that areas of charts are filled with, as ``url(#fill-...)``."""
    made = []
    for kind, (colour, mark) in [*_LOOKS.items(), (_OTHER, (_GREY, "crossed"))]:
        made.append(
            f'<pattern id="fill-{key_of(kind)}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{colour}"/>{_MARKS.get(mark, "")}</pattern>'
        )
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{"".join(made)}</defs></svg>'


def legend(kinds: Iterable[str]) -> str:
    """Return the kinds with their looks, in the order in which charts stack them, from the bottom."""
    items = "".join(f'<li><i class="k-{key_of(kind)}"></i>{text(kind)}</li>' for kind in kinds)
    return f'<ul class="legend">{items}</ul>'


def _rules() -> str:
    made = []
    for kind, (colour, mark) in [*_LOOKS.items(), (_OTHER, (_GREY, "crossed"))]:
        ink = "#fff" if colour == _BLUE else "#111"
        image = {
            "plain": "",
            "striped": "background-image:repeating-linear-gradient(135deg,#0004 0 2px,#0000 2px 6px);",
            "dotted": "background-image:radial-gradient(#0006 1.5px,#0000 1.6px);background-size:7px 7px;",
            "crossed": "background-image:repeating-linear-gradient(45deg,#0003 0 1px,#0000 1px 6px);",
        }[mark]
        made.append(f".k-{key_of(kind)}{{background-color:{colour};{image}color:{ink}}}")
    for kind, (direction, width, far) in _LINES.items():
        image = f"repeating-linear-gradient({direction}deg,#0008 0 {width}px,#0000 {width}px {far}px)"
        made.append(f".p-{texture_of(kind)}{{background-image:{image}}}")
    for kind, far in _DOTS.items():
        image = "radial-gradient(#0008 1.2px,#0000 1.5px)"
        made.append(f".p-{texture_of(kind)}{{background-image:{image};background-size:{far}px {far}px}}")
    return "\n".join(made)


STYLE = f"""
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; margin: .4rem 0;
  font-size: .85rem; }}
.legend i, .swatch {{ display: inline-block; width: 1.1em; height: 1.1em; border-radius: .2em; margin-right: .4em;
  vertical-align: -.15em; }}
.defs {{ position: absolute; }}
{_rules()}
"""
