"""A report as a list of blocks, written as Markdown or as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; rows are as long as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Image:
    """A PNG or SVG file inside the report's folder.

    Attributes:
        path: of the file.
        text: said in its place.
    """

    path: Path
    text: str


@dataclass(frozen=True)
class Section:
    """More for the HTML report alone, such as a simulator's tables or a trace's SVG.

    Attributes:
        title: its heading.
        html: a fragment, taken as it is: no scripts, no addresses outside the file (the page forbids both).
    """

    title: str
    html: str


Block = Heading | Paragraph | Table | Image | Section

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: #222; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.2em; border-bottom: 1px solid #ddd; padding-bottom: .2em; }
.wide { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .6em; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { background: #f5f5f5; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
th:first-child { background: #f5f5f5; }
tbody tr:hover td { background: #f0f6ff; }
img { max-width: 100%; height: auto; }
"""


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Markdown; images are linked relative to ``folder``, and sections of HTML alone are left out."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Paragraph):
            parts.append(block.text)
        elif isinstance(block, Table):
            lines = [block.header, ["---"] * len(block.header), *block.rows]
            escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in escaped))
        elif isinstance(block, Image):
            parts.append(f"![{block.text}]({block.path.relative_to(folder).as_posix()})")
    return "\n\n".join(parts) + "\n"


def to_html(blocks: Sequence[Block], title: str) -> str:
    """One HTML page: images as data URIs, no scripts, and a policy that forbids every request."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(map(_html, blocks))
        + "\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Table):
        head = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
        body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows)
        table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        return f'<div class="wide">{table}</div>'
    if isinstance(block, Image):
        data = base64.b64encode(block.path.read_bytes()).decode()
        return f'<p><img src="data:{_TYPES[block.path.suffix]};base64,{data}" alt="{escape(block.text)}"></p>'
    return f"<h2>{escape(block.title)}</h2>\n{block.html}"
