"""Draws the blocks of a prompt as one SVG: a column a layer, a box a node, a line from parent to child.

Kinds of nodes differ in outline and weight as well as in colour, so that they can be told apart in print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree as ET

from .forest import BlockPicture, Kind, Node

_COLUMN, _ROW, _BOX = 136, 22, (104, 18)
_MARGIN, _HEAD = 16, 58
_MIN_WIDTH = 1000
_LONGEST = 13
"""Characters of a token that fit into its box."""

_INVISIBLE = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}
"""Symbols for blanks: open box, arrow with a corner, arrow to a bar."""


class _Look(NamedTuple):
    meaning: str
    fill: str
    stroke: str
    width: float
    dashes: str
    text: str


_LOOKS: dict[Kind, _Look] = {
    "root": _Look("live beam before the block", "#ffffff", "#333333", 1.2, "", "#222222"),
    "accepted": _Look("drafted and accepted", "#0b6e6e", "#0b6e6e", 1.2, "", "#ffffff"),
    "recovered": _Look("recovered: chosen, not drafted", "#fff4e5", "#b35900", 1.8, "5 3", "#7a3d00"),
    "bonus": _Look("bonus layer", "#eaf1fd", "#2457b3", 1.8, "", "#1c4489"),
    "ended": _Look("beam that ended", "#ffffff", "#8b1a1a", 1.8, "2 2", "#8b1a1a"),
    "dead": _Look("drafted in vain", "#f3f3f3", "#d0d0d0", 0.8, "", "#8a8a8a"),
}


def draw_forest(blocks: Sequence[BlockPicture], title: str) -> str:
    """An SVG document of some blocks, one below the other.

    Args:
        blocks: of one prompt.
        title: over the first.

    Returns:
        XML without scripts and without references to anything outside it.
    """
    width = max([_MIN_WIDTH, *map(_width, blocks)])
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    root.set("font-family", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
    root.set("font-size", "11")
    ET.SubElement(root, "title").text = visible(title, spaces=True)
    _text(root, _MARGIN, _MARGIN + 12, visible(title, spaces=True)[:110], size=15, weight="bold")
    _legend(root, _MARGIN + 26)
    left, top, tallest = 0.0, _MARGIN + 50.0, 0.0
    for block in blocks:  # side by side while there is room
        if left + _width(block) > width:
            left, top, tallest = 0.0, top + tallest + 10, 0.0
        tallest = max(tallest, _draw_block(root, block, left, top))
        left += _width(block)
    top += tallest + 4
    for name, value in (("width", f"{width:g}"), ("height", f"{top:g}"), ("viewBox", f"0 0 {width:g} {top:g}")):
        root.set(name, value)
    return ET.tostring(root, encoding="unicode")


def visible(text: str, spaces: bool = False) -> str:
    """A token as it can be seen: blanks by symbols, everything that XML or a reader cannot show by U+FFFD.

    Args:
        text: of the token.
        spaces: leave plain spaces as they are.
    """
    shown = {" ": " "} if spaces else _INVISIBLE
    return "".join(shown.get(one, one if one.isprintable() and one not in "\ufffe\uffff" else "\ufffd") for one in text)


def _legend(root: ET.Element, top: float) -> None:
    left = float(_MARGIN)
    for kind, look in _LOOKS.items():
        _box(root, left, top, 14, 12, kind)
        _text(root, left + 20, top + 10, look.meaning)
        left += 34 + 6.7 * len(look.meaning)


def _width(block: BlockPicture) -> float:
    return 2 * _MARGIN + len(block.columns) * _COLUMN + _BOX[0]


def _draw_block(root: ET.Element, block: BlockPicture, left: float, top: float) -> float:
    """Draw a block; its height."""
    rows, lefts = _rows(block), [left + _MARGIN + column * _COLUMN for column in range(len(block.columns) + 1)]
    height = _HEAD + _ROW * max(rows.values(), default=0) + _ROW
    frame = {"x": left + 4, "y": top, "width": _width(block) - 8, "height": height, "rx": 6}
    paint = {"fill": "none", "stroke": "#e2e2e2"}
    ET.SubElement(root, "rect", {**{name: f"{value:g}" for name, value in frame.items()}, **paint})
    _text(root, lefts[0], top + 18, f"Block {block.number}", size=13, weight="bold")
    _text(root, lefts[0], top + 34, f"{block.position} tokens", fill="#555555", size=10)
    _text(root, lefts[0], top + 46, f"+ {block.advanced}", fill="#555555", size=10)
    for place, column in zip(lefts[1:], block.columns, strict=True):
        drafted = "bonus" if column.draft_width is None else f"draft width {column.draft_width}"
        kept = "not reached" if column.width is None else f"width {column.width}"
        _text(root, place, top + 34, drafted, fill="#555555", size=10)
        _text(root, place, top + 46, kept, fill="#555555", size=10)
    places = {index: (lefts[node.column], top + _HEAD + _ROW * rows[index]) for index, node in enumerate(block.nodes)}
    # lines below boxes, those of beams above those of dead nodes
    for index, node in sorted(enumerate(block.nodes), key=lambda item: item[1].kind != "dead"):
        if node.parent >= 0:
            _line(root, places[node.parent], places[index], node.kind)
    for index, node in enumerate(block.nodes):
        _draw_node(root, node, *places[index])
    return height


def _rows(block: BlockPicture) -> dict[int, int]:
    """The row of each node: columns are sorted by the parents' rows, so that lines do not cross."""
    rows: dict[int, int] = {}
    for column in range(len(block.columns) + 1):
        here = [index for index, node in enumerate(block.nodes) if node.column == column]
        here.sort(key=lambda index: (rows.get(block.nodes[index].parent, 0), index))
        rows.update({index: row for row, index in enumerate(here)})
    return rows


def _draw_node(root: ET.Element, node: Node, left: float, top: float) -> None:
    group = ET.SubElement(root, "g", {"class": node.kind})
    text = visible(node.text)
    ET.SubElement(group, "title").text = f"{text} ({_LOOKS[node.kind].meaning}), log-probability {node.score:.3f}"
    _box(group, left, top, *_BOX, node.kind)
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "\u2026"
    _text(group, left + 6, top + 13, short, fill=_LOOKS[node.kind].text)


def _box(parent: ET.Element, left: float, top: float, width: float, height: float, kind: Kind) -> None:
    look = _LOOKS[kind]
    shape = {"x": f"{left:g}", "y": f"{top:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": "4"}
    paint = {"fill": look.fill, "stroke": look.stroke, "stroke-width": f"{look.width:g}"}
    dashes = {"stroke-dasharray": look.dashes} if look.dashes else {}
    ET.SubElement(parent, "rect", {**shape, **paint, **dashes})


def _line(root: ET.Element, start: tuple[float, float], end: tuple[float, float], kind: Kind) -> None:
    x0, y0 = start[0] + _BOX[0], start[1] + _BOX[1] / 2
    x1, y1 = end[0], end[1] + _BOX[1] / 2
    middle = (x0 + x1) / 2
    look = _LOOKS[kind]
    ET.SubElement(
        root,
        "path",
        {"d": f"M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}", "fill": "none"},
        stroke=look.stroke,
        **{"stroke-width": f"{look.width:g}"},
    )


def _text(
    parent: ET.Element,
    left: float,
    base: float,
    text: str,
    fill: str = "#222222",
    size: float | None = None,
    weight: str | None = None,
) -> None:
    attributes = {"x": f"{left:g}", "y": f"{base:g}", "fill": fill}
    attributes |= {} if size is None else {"font-size": f"{size:g}"}
    attributes |= {} if weight is None else {"font-weight": weight}
    ET.SubElement(parent, "text", attributes).text = text
