"""Plots of a trained controller, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve

from .baselines import Cells
from .scores import Array, reliability


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)  # Figure without pyplot: no global state, no display
    return path


def _axes(width: float = 5.5, height: float = 4.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def plot_reliability(cells: Cells, probs: Array, path: Path) -> Path:
    """Predicted against observed success, one line per width."""
    figure, axes = _axes()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for width in np.unique(cells.width):
        chosen = cells.width == width
        predicted, observed, _ = reliability(probs[chosen], cells.label[chosen], bins=10)
        axes.plot(predicted, observed, marker="o", markersize=3, label=f"w = {width}")
    axes.set(xlabel="predicted P(success)", ylabel="observed rate", title="Reliability, held-out prompts")
    axes.legend()
    return _save(figure, path)


def plot_roc(cells: Cells, probs_by_model: Mapping[str, Array], path: Path) -> Path:
    """ROC curves of several models on the same cells."""
    figure, axes = _axes()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for name, probs in probs_by_model.items():
        false, true, _ = roc_curve(cells.label, probs)
        axes.plot(false, true, label=name)
    axes.set(xlabel="false positive rate", ylabel="true positive rate", title="ROC, held-out prompts")
    axes.legend()
    return _save(figure, path)


def plot_acceptance(cells: Cells, probs: Array, edges: Sequence[int], path: Path) -> Path:
    """Observed and predicted success over (width, draft width), as two heat maps."""
    widths = np.unique(cells.width)
    figure = Figure(figsize=(10, 1.6 + 0.45 * len(widths)), layout="constrained")
    for place, (title, values) in enumerate((("observed", cells.label.astype(float)), ("predicted", probs)), start=1):
        axes = figure.add_subplot(1, 2, place)
        table = np.full((len(widths), len(edges)), np.nan)
        for line, width in enumerate(widths):
            for column in range(len(edges)):
                chosen = (cells.width == width) & (cells.column == column)
                if chosen.any():
                    table[line, column] = values[chosen].mean()
                    axes.text(column, line, f"{table[line, column]:.2f}", ha="center", va="center", fontsize=7)
        axes.imshow(table, vmin=0.0, vmax=1.0, cmap="YlGn", aspect="auto")
        axes.set_xticks(range(len(edges)), [str(edge) for edge in edges])
        axes.set_yticks(range(len(widths)), [str(width) for width in widths])
        axes.set(xlabel="draft width m", ylabel="width w", title=f"P(success), {title}")
    return _save(figure, path)


def plot_importance(importance: Mapping[str, float], path: Path, most: int = 25) -> Path:
    """Bars of the most important features."""
    ranked = sorted(importance.items(), key=lambda item: item[1])[-most:]
    figure, axes = _axes(6.5, 1.0 + 0.22 * len(ranked))
    axes.barh([name for name, _ in ranked], [value for _, value in ranked])
    axes.set(xlabel="rise in negative log-likelihood when shuffled (nats)", title="Permutation importance")
    axes.tick_params(axis="y", labelsize=7)
    return _save(figure, path)
