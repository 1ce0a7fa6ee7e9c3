"""What a benchmark says: results.parquet, summary.json, report.md with plots, and report.html in one file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .html import Block, Heading, Image, Paragraph, Table, to_html, to_markdown
from .metrics import Row, paired_ratios, summarise
from .plots import plot_acceptance, plot_categories, plot_pareto, plot_time
from .runner import Part, Plan

FORMAT, VERSION = "beamwise-bench", 1
SUMMARY, RESULTS = "summary.json", "results.parquet"
FORESTS = "forests"
"""Folder inside a benchmark's: every SVG file in it is shown at the end of the report."""

_NOT_MEASURED = "not measured"
_READING = (
    "Every prompt is decoded by every method in turn, in an order that rotates, in one process; one prompt apart from "
    "these warms each method up. tokens/s counts positions: a step by which all beams advance is one token, whether "
    "the returned text keeps it or not. The speed-up is the median over prompts of the paired ratio of tokens/s to the "
    "baseline's, with its 95 % bootstrap interval. Likelihoods are the mean per token of the best returned text under "
    "the float32 target without warping. 'same text' compares with Beamwise's target alone where the text is due to be "
    "equal: in float32 it must be, exact ties apart; in bfloat16 forwards of different shapes round differently, and "
    "beams that nearly tie can change places. Slots of the target's KV cache are computed for transformers (one cache "
    "per beam) and counted for Beamwise."
)


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        html: the page for people.
        plots: PNG files.
        headline: flat figures, for a tracker.
        table: the same as a table: column names and rows.
    """

    html: Path
    plots: list[Path]
    headline: dict[str, float]
    table: tuple[list[str], list[list[Any]]]


def write_report(
    folder: Path,
    plan: Plan,
    parts: Mapping[str, Part],
    rows: Sequence[Row],
    asked: Mapping[str, Any],
    baseline: str,
    sections: Sequence[Block] = (),
) -> Report:
    """Write everything; each file appears under its name only when it is complete, summary.json last.

    Args:
        folder: of the run.
        plan: what was measured.
        parts: by setting's name; for the methods that could not run.
        rows: from `runner.judge`.
        asked: options, prompts, machine and versions, for the record.
        baseline: method that ratios are to.
        sections: more for the HTML report.
    """
    Part(list(rows), {}).save(folder / RESULTS)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.setting, row.method), []).append(row)
    settings, methods = plan.settings, [method.name for method in plan.methods]
    summary = _summary(plan, parts, groups, asked, baseline)
    plots_folder = folder / "plots"
    plots_folder.mkdir(exist_ok=True)
    pareto = plot_pareto(settings, groups, methods, plots_folder)
    speed = plot_categories(settings, groups, methods, baseline, plots_folder)
    depth = plot_acceptance(settings, groups, methods, plots_folder)
    times = plot_time(settings, groups, methods, plots_folder)
    blocks: list[Block] = [Heading("Beamwise benchmark", 1), Paragraph(_about(asked)), Paragraph(_READING)]
    blocks += [Heading(f"Speed-up over {baseline}"), _overview(summary, methods)]
    for title, paths in (
        ("Quality against speed", pareto),
        ("Speed by category", speed),
        ("Acceptance by layer and width", depth),
        ("Where the time goes", times),
    ):
        blocks += [Heading(title), *_images(paths)] if paths else []
    blocks.append(Heading("All figures"))
    for entry in summary["settings"]:
        blocks += _setting_blocks(entry)
    forests = sorted((folder / FORESTS).glob("*.svg"))
    blocks += [Heading("Forests"), *_images(forests)] if forests else []
    _write(folder / "report.md", to_markdown(blocks, folder))
    _write(folder / "report.html", to_html([*blocks, *sections], "Beamwise benchmark"))
    _write(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    table = _flat(summary)
    return Report(folder / "report.html", [*pareto, *speed, *depth, *times], _headline(summary), table)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _images(paths: Iterable[Path]) -> list[Block]:
    return [Image(path, path.stem.replace("_", " ")) for path in paths]


def _about(asked: Mapping[str, Any]) -> str:
    machine, versions = asked["machine"], asked["versions"]
    where = machine["gpu"] or f"{machine['cpus']} CPUs ({machine['machine']}), {machine['threads']} threads"
    return (
        f"Target {asked['target']}, draft {asked['draft']}, controller {asked['controller']}, "
        f"{asked['prompts']['count']} prompts, at most {asked['max_new_tokens']} new tokens, on {where}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + "."
    )


def _summary(
    plan: Plan,
    parts: Mapping[str, Part],
    groups: Mapping[tuple[str, str], Sequence[Row]],
    asked: Mapping[str, Any],
    baseline: str,
) -> dict[str, Any]:
    entries = []
    for setting in plan.settings:
        base = groups.get((setting.name, baseline), [])
        names = [method.name for method in plan.methods]
        of_method = {name: groups[setting.name, name] for name in names if (setting.name, name) in groups}
        categories = sorted({row.category for rows in of_method.values() for row in rows})
        entries.append(
            {
                "name": setting.name,
                **asdict(setting),
                "methods": {method: summarise(rows, base) for method, rows in of_method.items()},
                "categories": {
                    category: {method: _category(rows, base, category) for method, rows in of_method.items()}
                    for category in categories
                },
                "skipped": dict(parts[setting.name].skipped),
            }
        )
    return {"format": FORMAT, "version": VERSION, "asked": dict(asked), "baseline": baseline, "settings": entries}


def _category(rows: Sequence[Row], base: Sequence[Row], category: str) -> dict[str, Any]:
    rows = [row for row in rows if row.category == category]
    ratios = paired_ratios(rows, base)
    return {
        "prompts": len(rows),
        "tokens_per_second": sum(row.positions for row in rows) / sum(row.seconds for row in rows) if rows else None,
        "ratio": statistics.median(ratios) if ratios else None,
    }


def _overview(summary: Mapping[str, Any], methods: Sequence[str]) -> Table:
    """Speed-ups alone: a line per setting, a column per method."""
    lines = []
    for entry in summary["settings"]:
        cells = []
        for method in methods:
            ratio = entry["methods"].get(method, {}).get("ratio")
            cells.append("-" if ratio is None else f"{ratio[0]:.2f}")
        lines.append([entry["name"], *cells])
    return Table(["setting", *methods], lines)


_COLUMNS = (
    "method",
    "tokens/s",
    "speed-up [95 %]",
    "target forwards/token",
    "draft forwards/token",
    "acceptance length",
    "mean width",
    "time: target, draft, rest",
    "KV slots",
    "KV MiB",
    "peak memory, MiB",
    "J/token",
    "log-likelihood",
    "GSM8K",
    "exact match",
    "F1",
    "same text",
)


def _number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    ratio, due = figures["ratio"], figures["identical"]
    shares = [figures[f"share_{part}"] for part in ("target", "draft", "rest")]
    mib = 2.0**20
    return [
        _number(figures["tokens_per_second"], 1),
        "-" if ratio is None else f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]",
        _number(figures["target_forwards_per_token"], 2),
        _number(figures["draft_forwards_per_token"], 2),
        _number(figures["mean_acceptance_length"], 2),
        _number(figures["mean_width"], 2),
        _NOT_MEASURED if None in shares else ", ".join(f"{share:.0%}" for share in shares),
        str(figures["peak_slots"]),
        _number(figures["kv_bytes"] / mib, 1),
        _number(None if figures["peak_bytes"] is None else figures["peak_bytes"] / mib, 0, _NOT_MEASURED),
        _number(figures["joules_per_token"], 3, _NOT_MEASURED),
        *(_number(figures[name], 3) for name in ("log_likelihood", "number_correct", "exact_match", "f1")),
        "-" if due is None else f"{due[0]} of {due[1]}",
    ]


def _setting_blocks(entry: Mapping[str, Any]) -> list[Block]:
    lines = [[method, *_cells(figures)] for method, figures in entry["methods"].items()]
    lines += [[method, f"skipped: {why}", *[""] * (len(_COLUMNS) - 2)] for method, why in entry["skipped"].items()]
    methods = list(entry["methods"])
    by_category = [
        [
            f"{category} ({max(one['prompts'] for one in cells.values())})",
            *("-" if cells[method]["ratio"] is None else f"{cells[method]['ratio']:.2f}" for method in methods),
        ]
        for category, cells in entry["categories"].items()
    ]
    return [
        Heading(entry["name"], 3),
        Table(_COLUMNS, lines),
        Paragraph("Speed-up by category (prompts), median:"),
        Table(["category", *methods], by_category),
    ]


def _flat(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    names = [name for name in ("tokens_per_second", "mean_acceptance_length", "mean_width", "log_likelihood", "f1")]
    rows = [
        [entry["name"], method, *(figures[name] for name in names), *(figures["ratio"] or [None] * 3)]
        for entry in summary["settings"]
        for method, figures in entry["methods"].items()
    ]
    return ["setting", "method", *names, "ratio", "ratio_low", "ratio_high"], rows


def _headline(summary: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{entry['name']}/{method}/{name}": value
        for entry in summary["settings"]
        for method, figures in entry["methods"].items()
        for name, value in (
            ("tokens_per_second", figures["tokens_per_second"]),
            ("ratio", (figures["ratio"] or [None])[0]),
        )
        if value is not None
    }
