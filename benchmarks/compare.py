"""Two benchmarks of the same prompts side by side: paired ratios per setting and method."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from beamwise.decoding.errors import ConfigError, FormatError
from beamwise.decoding.safe_files import read_json

from .html import Block, Heading, Paragraph, Table, to_markdown
from .metrics import Row, median_interval, paired_ratios
from .report import FORMAT, RESULTS, SUMMARY, VERSION
from .runner import Part

_MUST_AGREE = ("prompts", "max_new_tokens", "temperature", "top_k")
_MAY_DIFFER_QUIETLY = ("methods", "num_beams", "sampling", "dtypes", "shapes")


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> str:
    """Markdown: a table of tokens per second of both and the median paired ratio, second over first.

    Args:
        first: folder of a benchmark.
        second: another one of the same prompts.

    Raises:
        ConfigError: other prompts or lengths, or no setting and method in common.
        FormatError: no finished benchmark, or a damaged one.
    """
    asked = [_read_asked(folder) for folder in (first, second)]
    for name in _MUST_AGREE:
        if asked[0].get(name) != asked[1].get(name):
            raise ConfigError(
                f"'{first}' and '{second}' cannot be compared: their {name} differ "
                f"({asked[0].get(name)}, {asked[1].get(name)}); measure both with the same"
            )
    groups = [_read_rows(Path(folder)) for folder in (first, second)]
    common = [key for key in groups[0] if key in groups[1]]
    if not common:
        raise ConfigError(f"'{first}' and '{second}' have no setting and method in common: measure one of them again")
    names = sorted({*asked[0], *asked[1]} - set(_MAY_DIFFER_QUIETLY))
    other = [f"{name} {asked[0].get(name)} and {asked[1].get(name)}" for name in names if _differs(asked, name)]
    left_out = len(groups[0]) + len(groups[1]) - 2 * len(common)
    blocks: list[Block] = [
        Heading(f"B = {second} over A = {first}", 1),
        Paragraph(
            f"Median over prompts of the paired ratio of tokens/s, B over A, with its 95 % bootstrap interval. "
            f"Only in one of them, and left out: {left_out} pairs of setting and method. "
            + (f"They differ in: {'; '.join(other)}." if other else "They were asked for the same otherwise.")
        ),
        Table(
            [
                "setting",
                "method",
                "prompts",
                "A, tokens/s",
                "B, tokens/s",
                "B/A [95 %]",
                "log-likelihood A, B",
                "same text",
            ],
            [_line(key, groups[0][key], groups[1][key]) for key in common],
        ),
    ]
    return to_markdown(blocks, Path())


def _differs(asked: list[dict[str, Any]], name: str) -> bool:
    return bool(asked[0].get(name) != asked[1].get(name))


def _read_asked(folder: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        raw = read_json(folder, SUMMARY)
    except (OSError, ValueError) as error:
        raise FormatError(f"'{folder}' holds no finished benchmark ({error}): run `beamwise bench` first") from error
    asked = raw.get("asked") if isinstance(raw, dict) and raw.get("format") == FORMAT else None
    if not isinstance(asked, dict) or raw.get("version") != VERSION:
        raise FormatError(f"'{folder}/{SUMMARY}' is not a benchmark's of version {VERSION}: run `beamwise bench` again")
    return asked


def _read_rows(folder: Path) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in Part.load(folder / RESULTS).rows:
        groups.setdefault((row.setting, row.method), []).append(row)
    return groups


def _line(key: tuple[str, str], first: list[Row], second: list[Row]) -> list[str]:
    texts = {(row.source, row.prompt): row.tokens for row in first}
    same = sum(texts.get((row.source, row.prompt)) == row.tokens for row in second)
    median, low, high = median_interval(paired_ratios(second, first))
    rates = [sum(row.positions for row in rows) / sum(row.seconds for row in rows) for rows in (first, second)]
    scores = []
    for rows in (first, second):
        known = [row.log_likelihood for row in rows if row.log_likelihood is not None]
        scores.append(f"{sum(known) / len(known):.3f}" if known else "-")
    return [
        *key,
        str(len(second)),
        *(f"{rate:.1f}" for rate in rates),
        f"{median:.2f} [{low:.2f}, {high:.2f}]",
        ", ".join(scores),
        f"{same} of {len(second)}",
    ]
