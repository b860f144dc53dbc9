"""Draws what a rank holds at the peak as a treemap: modules within modules, and in each the kinds of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmfsdp.basics.pages.markup import exact, share, text
from mmfsdp.basics.text import human_bytes
from mmfsdp.rehearsal.reporting.looks import key_of
from mmfsdp.rehearsal.reporting.modules import Node, owner_of

__all__ = ["STYLE", "squarified", "treemap"]

_LEVELS = 4  # of modules within modules
_SMALLEST = 0.002  # of the whole; smaller ones are joined
_LONE = 0.9  # of a module; a module inside it that holds more replaces it
_FRAMED = 0.04  # of the whole; smaller groups get no title

_SIDES = ("left", "top", "width", "height")

_Box = tuple[float, float, float, float]
"""Left, top, width and height."""


@dataclass
class _Item:
    """A rectangle: a kind of memory of a module, or a group of them."""

    label: str
    """The module's name, shortened to fit its box in the treemap."""
    where: str
    nbytes: int
    kind: str = ""
    inside: tuple[_Item, ...] = ()


def treemap(root: Node, scale: float = 1.0) -> str:
    """Return what the nodes hold at the peak as nested rectangles.

    Args:
        root: The model.
        scale: The height, as a share of the highest treemap's on the page: apart from titles, equal areas are equal
            bytes.
    """
    total = root.total("held").total()
    items = _items(root, 0, total)
    if not items:
        return ""
    inner = "".join(_boxes(items, total, 100.0, 52.0))
    return (
        f'<div class="cells treemap" style="--scale:{scale:.4f}" role="group" '
        f'aria-label="Bytes held at the peak, by module and kind">{inner}</div><output class="told"></output>'
    )


def _items(node: Node, level: int, total: int) -> list[_Item]:
    """Return what a node holds itself, and its modules; the largest first."""
    own = _short(node) if node.path else ""
    found = [
        _Item(own or owner_of(kind), node.path or owner_of(kind), nbytes, kind)
        for kind, nbytes in node.held.items()
        if nbytes
    ]
    for child in _lifted(node):
        nbytes = child.total("held").total()
        label = child.path.removeprefix(f"{node.path}.") if node.path else child.path
        if level + 1 < _LEVELS:
            inside = _items(child, level + 1, total)
        else:
            short = _short(child)
            inside = [_Item(short, child.path, count, kind) for kind, count in child.total("held").items() if count]
        if len(inside) == 1 and not inside[0].inside:
            found.append(_Item(label, child.path, nbytes, inside[0].kind))
        else:
            found.append(_Item(label, child.path, nbytes, inside=tuple(inside)))
    large = sorted((item for item in found if item.nbytes >= _SMALLEST * total), key=lambda item: -item.nbytes)
    small = [item for item in found if item.nbytes < _SMALLEST * total]
    if len(small) > 1:
        joined = sum(item.nbytes for item in small)
        large.append(_Item(f"{len(small)} smaller", node.path or "the model", joined, "smaller"))
    return large + small[: len(small) == 1]


def _short(node: Node) -> str:
    """Return the last part of a module's name, with the one before if it is a number: ``layers.{0..3}``."""
    before = node.path.removesuffix(node.name).rstrip(".").rpartition(".")[2]
    return node.name if node.name.isidentifier() or not before.isidentifier() else f"{before}.{node.name}"


def _lifted(node: Node) -> Iterator[Node]:
    """Yield the modules of a node that hold something; of a module that is little but one of its own, those."""
    for child in node.children.values():
        nbytes = child.total("held").total()
        largest = max((below.total("held").total() for below in child.children.values()), default=0)
        if nbytes and largest >= _LONE * nbytes:
            if child.held.total():
                yield replace(child, children={})
            yield from _lifted(child)
        elif nbytes:
            yield child


def _boxes(items: Sequence[_Item], total: int, width: float, height: float) -> Iterator[str]:
    items = sorted(items, key=lambda item: -item.nbytes)
    boxes = squarified([item.nbytes for item in items], width, height)
    for item, (left, top, wide, high) in zip(items, boxes, strict=True):
        parts = zip(_SIDES, (left / width, top / height, wide / width, high / height), strict=True)
        style = ";".join(f"{side}:{100 * part:.2f}%" for side, part in parts)
        if item.inside:
            inner = "".join(_boxes(item.inside, total, wide, high))
            titled = item.nbytes >= _FRAMED * total
            title = f"<b>{text(item.label)} <small>{human_bytes(item.nbytes)}</small></b>" if titled else ""
            yield f'<div class="group{" titled" if titled else ""}" style="{style}">{title}<div>{inner}</div></div>'
        else:
            kind = f'<span class="kind">{text(item.kind)}</span>' if item.kind != "smaller" else ""
            said = f"{item.where}: {item.kind}, {exact(item.nbytes)}, {share(item.nbytes, total)} of the peak"
            yield (
                f'<div class="cell k-{key_of(item.kind)}" role="img" tabindex="-1" title="{text(said)}" '
                f'data-bytes="{item.nbytes}" style="{style}"><span>{text(item.label)}</span>'
                f"<span>{human_bytes(item.nbytes)}</span>{kind}</div>"
            )


STYLE = """
.treemap { position: relative; height: calc(34rem * var(--scale)); background: var(--line); overflow: hidden;
  border-radius: .3rem; }
.treemap div { position: absolute; overflow: hidden; }
.treemap .group { border: 1px solid var(--page); background: var(--soft); }
.treemap .group > div { inset: 0; }
.treemap .titled > div { inset: 1.15rem 1px 1px 1px; }
.treemap .group > b { display: block; font: 600 .72rem/1.15rem system-ui, sans-serif; padding: 0 .3rem;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.treemap .cell { border: 1px solid var(--page); font-size: .72rem; line-height: 1.15; container-type: size; }
.treemap .cell span { display: block; padding: 0 .3rem; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.treemap .cell span:first-child { padding-top: .2rem; }
@container (max-height: 2.7rem) { .treemap .cell .kind { display: none; } }
@container (max-width: 2.6rem) or (max-height: 1.7rem) { .treemap .cell span { display: none; } }
.treemap .cell:focus-visible { outline: 3px solid var(--ink); outline-offset: -3px; }
.treemap .cell:hover { filter: brightness(1.1); }
.told { display: block; min-height: 1.6em; font-size: .85rem; color: var(--dim); }
@media (max-width: 48rem) { .treemap { height: calc(30rem * var(--scale)); } }
"""


def squarified(sizes: Sequence[float], width: float, height: float) -> list[_Box]:
    """Return a box for each size; together they fill the rectangle.

    The boxes are as square as rows along the shorter side make them (Bruls, Huizing, van Wijk, "Squarified Treemaps",
    2000).

    Args:
        sizes: Positive sizes, the largest first.
        width: The width of the rectangle.
        height: Its height.
    """
    scale = width * height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    boxes: list[_Box] = []
    left = top = 0.0
    while len(boxes) < len(areas):
        first = len(boxes)
        side = min(width, height)
        count = 1
        while first + count < len(areas) and _worst(areas[first : first + count + 1], side) <= _worst(
            areas[first : first + count], side
        ):
            count += 1
        row = areas[first : first + count]
        depth = sum(row) / side if side else 0.0
        along = 0.0
        for area in row:
            length = area / depth if depth else 0.0
            if width <= height:
                boxes.append((left + along, top, length, depth))
            else:
                boxes.append((left, top + along, depth, length))
            along += length
        if width <= height:
            top, height = top + depth, max(height - depth, 0.0)
        else:
            left, width = left + depth, max(width - depth, 0.0)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of the sides of a row's boxes."""
    total = sum(row)
    if not total or not side:
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))
