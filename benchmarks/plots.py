"""Plots of a benchmark, as PNG files: quality against speed, speed by category, acceptance, where the time goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .metrics import Row, acceptance_cells, paired_ratios
from .settings import Setting

Groups = Mapping[tuple[str, str], Sequence[Row]]
"""Rows by (setting's name, method)."""

_MARKERS = "osD^vP*X<>"
_QUALITIES = {
    "log_likelihood": "log-likelihood per token, nats",
    "number_correct": "GSM8K accuracy",
    "f1": "F1 of answers",
}


def _save(figure: Figure, path: Path) -> Path:
    scratch = path.with_name(f".{path.name}.writing")
    figure.savefig(scratch, dpi=110, format="png")  # Figure without pyplot: no global state, no display
    scratch.replace(path)
    return path


def _grid(lines: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray[Any, Any]]:
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _kinds(settings: Sequence[Setting]) -> list[tuple[str, str, bool]]:
    """(device, dtype, do_sample) of a grid, in order."""
    return list(dict.fromkeys((one.device, one.dtype, one.do_sample) for one in settings))


def _title(kind: tuple[str, str, bool]) -> str:
    return f"{'sampling' if kind[2] else 'greedy'}, {kind[1]}, {kind[0]}"


def _of_kind(settings: Sequence[Setting], kind: tuple[str, str, bool]) -> list[Setting]:
    return [one for one in settings if (one.device, one.dtype, one.do_sample) == kind]


def _quality(rows: Sequence[Row], name: str) -> float | None:
    values = [float(value) for row in rows if (value := getattr(row, name)) is not None]
    return statistics.fmean(values) if values else None


def plot_pareto(settings: Sequence[Setting], groups: Groups, methods: Sequence[str], folder: Path) -> list[Path]:
    """Quality against tokens per second (the paper's Figures 4 and 5): one file per kind of quality that is known.

    A point is a method at a number of beams; the grey line joins the points that no other one beats in both.
    """
    paths = []
    kinds = _kinds(settings)
    for name, words in _QUALITIES.items():
        if all(_quality(rows, name) is None for rows in groups.values()):
            continue
        columns = min(len(kinds), 2)
        figure, panels = _grid(-(-len(kinds) // columns), columns, 6.2, 4.6)
        for axes in panels.flat[len(kinds) :]:
            axes.set_axis_off()
        for axes, kind in zip(panels.flat, kinds, strict=False):
            _pareto_panel(axes, _of_kind(settings, kind), groups, methods, name)
            axes.set(xlabel="tokens/s", ylabel=words, title=_title(kind))
        known = [pair for axes in panels.flat for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in known}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
        paths.append(_save(figure, folder / f"pareto_{name}.png"))
    return paths


def _pareto_panel(axes: Axes, settings: Sequence[Setting], groups: Groups, methods: Sequence[str], name: str) -> None:
    everything = []
    for index, method in enumerate(methods):
        points = []
        for setting in settings:
            rows = groups.get((setting.name, method), [])
            quality = _quality(rows, name)
            if quality is not None:
                rate = sum(row.positions for row in rows) / sum(row.seconds for row in rows)
                points.append((rate, quality, setting.num_beams))
        if not points:
            continue
        everything += [point[:2] for point in points]
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        axes.plot(
            xs,
            ys,
            marker=_MARKERS[index % len(_MARKERS)],
            color=f"C{index % 10}",
            linewidth=0.7,
            label=method,
            alpha=0.85,
        )
        for x, y, beams in points:
            axes.annotate(
                str(beams), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7, color=f"C{index % 10}"
            )
    front = sorted(
        point
        for point in everything
        if not any(o[0] >= point[0] and o[1] >= point[1] and o != point for o in everything)
    )
    axes.plot(*zip(*front, strict=True), color="grey", linewidth=4, alpha=0.25, zorder=0, label="front")


def plot_categories(
    settings: Sequence[Setting], groups: Groups, methods: Sequence[str], baseline: str, folder: Path
) -> list[Path]:
    """Heat maps of the median paired ratio to the baseline by category and method: a file per kind of decoding."""
    paths = []
    for kind in _kinds(settings):
        chosen = [one for one in _of_kind(settings, kind) if groups.get((one.name, baseline))]
        shown = [m for m in methods if m != baseline and any((one.name, m) in groups for one in chosen)]
        if not shown:
            continue
        categories = sorted({row.category for one in chosen for row in groups[one.name, baseline]})
        lines, columns = -(-len(chosen) // 2), min(len(chosen), 2)
        figure, panels = _grid(lines, columns, 2.2 + 0.75 * len(shown), 1.9 + 0.26 * len(categories))
        for axes in panels.flat[len(chosen) :]:
            axes.set_axis_off()
        for axes, setting in zip(panels.flat, chosen, strict=False):
            table = np.full((len(categories), len(shown)), np.nan)
            for (line, category), (column, method) in product(enumerate(categories), enumerate(shown)):
                pair = [
                    [row for row in groups.get((setting.name, name), []) if row.category == category]
                    for name in (method, baseline)
                ]
                if ratios := paired_ratios(*pair):
                    table[line, column] = statistics.median(ratios)
            _heat(axes, np.log2(table), _texts(table), -1.2, 1.2, "RdYlGn")
            axes.set_xticks(range(len(shown)), [_wrap(name) for name in shown], fontsize=7)
            axes.set_yticks(range(len(categories)), categories, fontsize=8)
            axes.set_title(f"W = {setting.num_beams}")
        figure.suptitle(f"tokens/s over {baseline}'s, median of prompts: {_title(kind)}")
        paths.append(_save(figure, folder / f"categories_{_slug(kind)}.png"))
    return paths


def plot_acceptance(settings: Sequence[Setting], groups: Groups, methods: Sequence[str], folder: Path) -> list[Path]:
    """Share of the reached layers that were covered, by depth and width: a column per method, a line per sampling."""
    wanted: dict[bool, Callable[[Setting], bool]] = {
        False: lambda one: not one.do_sample,
        True: lambda one: one.do_sample,
    }
    cells = {
        (sample, method): acceptance_cells(
            [row for one in settings if test(one) for row in groups.get((one.name, method), [])]
        )
        for (sample, test), method in product(wanted.items(), methods)
    }
    shown = [method for method in methods if any(cells[sample, method] for sample in wanted)]
    samples = [sample for sample in wanted if any(cells[sample, method] for method in shown)]
    if not shown:
        return []
    layers = 1 + max(layer for found in cells.values() for layer, _ in found)
    widths = sorted({width for found in cells.values() for _, width in found})
    figure, panels = _grid(len(samples), len(shown), 1.6 + 0.5 * len(widths), 1.4 + 0.5 * layers)
    for (line, sample), (column, method) in product(enumerate(samples), enumerate(shown)):
        axes, table = panels[line, column], np.full((layers, len(widths)), np.nan)
        texts = _texts(table)
        for (layer, width), (reached, covered) in cells[sample, method].items():
            table[layer, widths.index(width)] = covered / reached
            texts[layer][widths.index(width)] = f"{covered / reached:.2f}\nof {reached}"
        _heat(axes, table, texts, 0.0, 1.0, "YlGn")
        axes.set_xticks(range(len(widths)), [str(width) for width in widths])
        axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
        axes.set_title(f"{method}\n{'sampling' if sample else 'greedy'}", fontsize=9)
        axes.set_xlabel("width w", fontsize=8)
        axes.set_ylabel("layer of the block", fontsize=8)
    figure.suptitle("share of the layers reached that were covered, all settings together")
    return [_save(figure, folder / "acceptance.png")]


def plot_time(settings: Sequence[Setting], groups: Groups, methods: Sequence[str], folder: Path) -> list[Path]:
    """Milliseconds per token in draft, target and the rest: a panel per W, a file per kind of decoding."""
    paths = []
    for kind in _kinds(settings):
        chosen = _of_kind(settings, kind)
        clocked = [
            {
                method: rows
                for method in methods
                if (rows := groups.get((one.name, method), [])) and all(row.target_s is not None for row in rows)
            }
            for one in chosen
        ]
        if not any(clocked):
            continue
        columns = min(len(chosen), 2)
        most = max(map(len, clocked))
        figure, panels = _grid(-(-len(chosen) // columns), columns, 6.0, 1.2 + 0.34 * most)
        for axes in panels.flat[len(chosen) :]:
            axes.set_axis_off()
        for axes, setting, by_method in zip(panels.flat, chosen, clocked, strict=False):
            _time_panel(axes, by_method)
            axes.set(title=f"W = {setting.num_beams}", xlabel="ms per token")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.suptitle(f"where the time goes: {_title(kind)}")
        paths.append(_save(figure, folder / f"time_{_slug(kind)}.png"))
    return paths


def _time_panel(axes: Axes, by_method: Mapping[str, Sequence[Row]]) -> None:
    names = list(by_method)[::-1]
    left = np.zeros(len(names))
    for part, color in (("target", "C0"), ("draft", "C1"), ("rest", "lightgrey")):
        sizes = []
        for name in names:
            rows = by_method[name]
            clocked = {key: sum(getattr(row, f"{key}_s") for row in rows) for key in ("target", "draft")}
            clocked["rest"] = sum(row.seconds for row in rows) - sum(clocked.values())
            sizes.append(1e3 * clocked[part] / sum(row.positions for row in rows))
        axes.barh(range(len(names)), sizes, left=left, color=color, label=part)
        left += np.asarray(sizes)
    for line, total in enumerate(left):
        axes.text(total, line, f" {total:.0f}", va="center", fontsize=7)
    axes.set_xlim(0, 1.1 * left.max() if len(left) else 1)
    axes.set_yticks(range(len(names)), names, fontsize=8)


def _texts(table: np.ndarray[Any, Any]) -> list[list[str]]:
    return [["" if np.isnan(value) else f"{value:.2f}" for value in line] for line in table]


def _heat(
    axes: Axes, values: np.ndarray[Any, Any], texts: Sequence[Sequence[str]], low: float, high: float, colors: str
) -> None:
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colors, aspect="auto")
    for line, column in product(*map(range, values.shape)):
        if texts[line][column]:
            red, green, blue, _ = image.cmap(image.norm(values[line, column]))
            color = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            axes.text(column, line, texts[line][column], ha="center", va="center", fontsize=7, color=color)


def _wrap(name: str) -> str:
    return name.replace(" ", "\n")


def _slug(kind: tuple[str, str, bool]) -> str:
    return f"{'sampling' if kind[2] else 'greedy'}_{kind[1]}_{kind[0].replace(':', '-')}"
