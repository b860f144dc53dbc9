"""Draws what a rank holds at the peak as a treemap: modules have colours, and kinds of memory have patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mmfsdp.basics.pages.markup import exact, name_text, share, size, text
from mmfsdp.basics.text import human_bytes
from mmfsdp.rehearsal.recording.step_records import KINDS
from mmfsdp.rehearsal.reporting.looks import texture_of
from mmfsdp.rehearsal.reporting.modules import OWNERS, Node, owner_of

__all__ = ["STYLE", "squarified", "treemaps"]

_LEVELS = 4  # of modules within modules
_SMALLEST = 0.002  # of the whole; smaller ones are joined
_LONE = 0.9  # of a module; a module inside it that holds more replaces it
_FRAMED = 0.05  # of the largest map; smaller groups get no title
_LARGE = 0.3  # of the whole; the modules inside a larger one have colours of their own

# Light colours for black labels, which people with any colour vision can tell apart (Paul Tol, "Colour Schemes", 2021).
# Charts by kind have none of them.
_COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#99ddff", "#bbcc33", "#aaaa00")
_REST = "rest"
_SMALLER = "smaller"

_Part = tuple[str, list["_Item"]]
"""A module, as HTML, and what it holds."""

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
    colour: str = ""
    """The look of the module; empty for that of the group around it."""


def treemaps(roots: Sequence[Node]) -> list[str]:
    """Return what each model's nodes hold at the peak as nested rectangles, and what colours and patterns mean.

    A module has the same colour in all of them, and apart from titles, equal areas are equal bytes.
    """
    totals = [root.total("held") for root in roots]
    items = [_items(root, 0, held.total()) for root, held in zip(roots, totals, strict=True)]
    parts = [_parts(own, held.total()) for own, held in zip(items, totals, strict=True)]
    sums: Counter[str] = Counter()
    for name, members in chain.from_iterable(parts):
        sums[name] += _sum(members)
    looks = {name: str(index) for index, (name, _) in enumerate(sums.most_common(len(_COLOURS)))}
    for name, members in chain.from_iterable(parts):
        for item in members:
            item.colour = looks.get(name, _REST)
    most = max(held.total() for held in totals)
    return [
        _treemap(own, part, held, most) if own else "" for own, part, held in zip(items, parts, totals, strict=True)
    ]


def _treemap(items: Sequence[_Item], parts: Sequence[_Part], held: Mapping[str, int], most: int) -> str:
    total = sum(held.values())
    shown = [(members[0].colour, name, _sum(members)) for name, members in parts if members[0].colour != _REST]
    if rest := total - sum(nbytes for *_, nbytes in shown):
        shown.append((_REST, "the rest", rest))
    modules = "".join(
        f'<li><i class="swatch m-{look}"></i>{name} {size(nbytes)}, {share(nbytes, total)}</li>'
        for look, name, nbytes in shown
    )
    kinds = "".join(
        f'<li><i class="swatch p-{texture_of(kind)}"></i>{text(kind)}</li>' for kind in KINDS if held.get(kind)
    )
    inner = "".join(_boxes(items, total, _FRAMED * most, 100.0, 52.0))
    return (
        f'<ul class="legend">{modules}</ul><ul class="legend">{kinds}</ul>'
        f'<div class="cells treemap" style="--scale:{total / most:.4f}" role="group" '
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
        large.append(_Item(f"{len(small)} smaller", node.path or "the model", joined, _SMALLER))
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


def _parts(items: Sequence[_Item], total: int) -> list[_Part]:
    """Return the modules that get a colour if there are enough, each as HTML with its items, the largest first.

    Where one module holds most, its modules have the colours, so that the picture has parts to tell apart.
    """
    parts = _by_module(items)
    split: set[str] = set()
    while len(parts) < len(_COLOURS):
        whole = max((part for part in parts if part[0].inside), key=_sum, default=[])
        if _sum(whole) <= _LARGE * total:
            break
        parts = [part for part in parts if part is not whole] + _by_module(whole[0].inside)
        split.add(whole[0].where)
    parts.sort(key=_sum, reverse=True)
    return [(_named(part[0].where, itself=part[0].where in split), part) for part in parts]


def _named(where: str, *, itself: bool) -> str:
    return where if where in OWNERS else f"<code>{name_text(where)}</code>{' itself' if itself else ''}"


def _by_module(items: Sequence[_Item]) -> list[list[_Item]]:
    """Return the items of each module, without those that are joined from several."""
    found: dict[str, list[_Item]] = {}
    for item in items:
        if item.kind != _SMALLER:
            found.setdefault(item.where, []).append(item)
    return [*found.values()]


def _sum(items: Sequence[_Item]) -> int:
    return sum(item.nbytes for item in items)


def _boxes(
    items: Sequence[_Item], total: int, framed: float, width: float, height: float, around: str = _REST
) -> Iterator[str]:
    items = sorted(items, key=lambda item: -item.nbytes)
    boxes = squarified([item.nbytes for item in items], width, height)
    for item, (left, top, wide, high) in zip(items, boxes, strict=True):
        parts = zip("xywh", (left / width, top / height, wide / width, high / height), strict=True)
        style = ";".join(f"--{side}:{100 * part:.2f}%" for side, part in parts)
        look = item.colour or around
        if item.inside:
            inner = "".join(_boxes(item.inside, total, framed, wide, high, look))
            titled = item.nbytes >= framed
            title = _line(text(item.label), f"<small>{human_bytes(item.nbytes)}</small>") if titled else ""
            kind = f"{' titled' if titled else ''}{f' m-{look}' if look != _REST else ''}"
            yield f'<div class="group{kind}" style="{style}">{title}<div>{inner}</div></div>'
        else:
            lines = _line(f"<b>{text(item.label)}</b>") + _line(human_bytes(item.nbytes))
            lines += _line(text(item.kind)) if item.kind != _SMALLER else ""
            said = f"{item.where}: {item.kind}, {exact(item.nbytes)}, {share(item.nbytes, total)} of the peak"
            yield (
                f'<div class="cell m-{look} p-{texture_of(item.kind)}" role="img" tabindex="-1" title="{text(said)}" '
                f'data-bytes="{item.nbytes}" style="{style}">{lines}</div>'
            )


def _line(*shown: str) -> str:
    return f'<span class="fit">{"".join(f"<span>{part}</span>" for part in shown)}</span>'


_RULES = "\n".join(f".m-{look} {{ --tint: {colour}; }}" for look, colour in [*enumerate(_COLOURS), (_REST, "#dddddd")])

# Where there is no room beside it, the map is mirrored along its diagonal, so that it is high instead of wide.
STYLE = f"""
{_RULES}
.treemap, .legend {{ --tint: #dddddd; }}
.swatch[class*=" m-"], .swatch[class*=" p-"] {{ background-color: var(--tint); }}
.treemap {{ position: relative; height: calc(min(34rem, max(52cqw, 22rem)) * var(--scale)); overflow: hidden;
  border-radius: .3rem; }}
.treemap div {{ position: absolute; overflow: hidden; left: var(--x); top: var(--y); width: var(--w);
  height: var(--h); }}
@container (max-width: 30rem) {{ .treemap {{ height: calc(165cqw * var(--scale)); }}
  .treemap div {{ left: var(--y); top: var(--x); width: var(--h); height: var(--w); }} }}
.treemap .group {{ border: 1px solid var(--page); background: var(--soft); }}
.treemap .group[class*=" m-"] {{ background: var(--tint); color: #111; }}
.treemap .group > div {{ inset: 0; width: auto; height: auto; }}
.treemap .titled > div {{ inset: 1.2rem 1px 1px 1px; }}
.treemap .group > .fit {{ font-size: .75rem; line-height: 1.2rem; height: 1.2rem; gap: 0 .35rem;
  font-weight: 600; }}
.treemap .group small {{ color: inherit; font-weight: 400; }}
.treemap .cell {{ border: 1px solid var(--page); font-size: .75rem; container-type: size; color: #111;
  background-color: var(--tint); }}
.treemap .cell .fit {{ height: 1.15rem; line-height: 1.15rem; }}
.treemap .cell .fit > span {{ padding: 0 .3rem; background: var(--tint); }}
@container (max-height: 3.5rem) {{ .treemap .cell .fit:nth-child(3) {{ display: none; }} }}
@container (max-height: 2.4rem) {{ .treemap .cell .fit:nth-child(2) {{ display: none; }} }}
@container (max-height: 1.2rem) {{ .treemap .cell .fit {{ display: none; }} }}
.treemap .cell:focus-visible {{ outline: 3px solid var(--ink); outline-offset: -3px; }}
.treemap .cell:hover {{ filter: brightness(1.1); }}
.told {{ display: block; min-height: 1.6em; font-size: .85rem; color: var(--dim); }}
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
