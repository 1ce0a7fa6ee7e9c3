"""What a trained controller is worth on held-out prompts, beside the baselines; written as JSON, Markdown and plots."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beamwise.controller.predictor import WidthPredictor, censored_nll
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES

from .baselines import Cells, fit_baselines, observed_cells
from .module import rows_outcomes
from .plots import plot_acceptance, plot_importance, plot_reliability, plot_roc
from .rows import Rows, TraceSource
from .scores import Array, Scores, score

LEARNED, PRIOR = "width predictor", "width predictor, before the draft runs"
MOST_ROWS = 200_000
"""Rows of a split that are compared: scikit-learn needs them in memory."""


@dataclass
class Report:
    """Held-out results.

    Attributes:
        scores: by model, over all observed cells.
        by_width: of the predictor, by number of kept beams w.
        exact: of the predictor, on the cells where every beam must be covered (w = W), by W.
        importance: rise in censored negative log-likelihood when a feature is shuffled, nats.
        rows: layers per split.
        plots: PNG files.
    """

    scores: dict[str, Scores]
    by_width: dict[str, Scores]
    exact: dict[str, Scores]
    importance: dict[str, float]
    rows: dict[str, int]
    plots: list[Path] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (NaN, where a score is undefined, as null), without the plots."""
        raw = {name: value for name, value in asdict(self).items() if name != "plots"}
        rounded: dict[str, Any] = json.loads(json.dumps(raw), parse_constant=lambda _: None)
        return rounded

    def markdown(self) -> str:
        """The tables."""
        lines = ["# Controller, held-out prompts", "", f"Layers: {self.rows}", ""]
        for title, table in (
            ("Models, all observed (layer, w, m)", self.scores),
            ("Predictor by width w", self.by_width),
            ("Predictor where all W beams must be covered", self.exact),
        ):
            lines += [
                f"## {title}",
                "",
                "| | AUROC | Brier | calibration error | NLL | cells |",
                "|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {name} | {s.auroc:.4f} | {s.brier:.4f} | {s.ece:.4f} | {s.nll:.4f} | {s.count} |"
                for name, s in table.items()
            ]
            lines.append("")
        ranked = sorted(self.importance.items(), key=lambda item: -item[1])[:12]
        lines += ["## Most important features", ""] + [f"- {name}: {value:.4f} nats" for name, value in ranked] + [""]
        return "\n".join(lines)


def predict_cells(predictor: WidthPredictor, rows: Rows, cells: Cells, prior: bool = False) -> Array:
    """The predictor's P(success) at cells, float32 (C,)."""
    with torch.inference_mode():
        if prior:
            probs = predictor.prior_probs(rows.features[:, : len(CONTEXT_NAMES)])
        else:
            probs = predictor.success_probs(rows.features)
    chosen: Array = probs.numpy()[cells.row, cells.width - 1, cells.column]
    return chosen


def permutation_importance(predictor: WidthPredictor, rows: Rows, repeats: int = 3, seed: int = 0) -> dict[str, float]:
    """Rise in censored negative log-likelihood (nats) when one feature is shuffled among the rows, mean of repeats."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = rows_outcomes(rows, predictor.config)
    with torch.inference_mode():
        base = float(censored_nll(predictor.full(rows.features), outcomes))
        importance = {}
        for column, name in enumerate(FEATURE_NAMES):
            shuffled = rows.features.clone()
            rises = []
            for _ in range(repeats):
                order = torch.randperm(len(rows), generator=generator)
                shuffled[:, column] = rows.features[order, column]
                rises.append(float(censored_nll(predictor.full(shuffled), outcomes)) - base)
            importance[name] = float(np.mean(rises))
    return importance


def make_report(predictor: WidthPredictor, source: TraceSource, folder: Path) -> Report:
    """Compare a trained, calibrated predictor with the baselines on the test prompts.

    Args:
        predictor: on the CPU.
        source: the traces; the baselines are fitted on its training rows.
        folder: for ``report.json``, ``report.md`` and ``plots/``.

    Returns:
        The report.
    """
    train, test = source.load("train", MOST_ROWS), source.load("test", MOST_ROWS)
    cells = observed_cells(test, predictor.config)
    probs = {
        LEARNED: predict_cells(predictor, test, cells),
        PRIOR: predict_cells(predictor, test, cells, prior=True),
    }
    baselines = fit_baselines(train, predictor.config)
    probs.update({name: baseline.predict(test, cells) for name, baseline in baselines.items()})
    mine = probs[LEARNED]
    beams = test.num_beams.numpy()[cells.row]
    by_width = {f"w = {w}": cells.width == w for w in np.unique(cells.width)}
    exact = {f"W = {w}": (cells.width == w) & (beams == w) for w in np.unique(beams)}
    report = Report(
        scores={name: score(values, cells.label) for name, values in probs.items()},
        by_width={name: score(mine[chosen], cells.label[chosen]) for name, chosen in by_width.items()},
        exact={name: score(mine[chosen], cells.label[chosen]) for name, chosen in exact.items() if chosen.any()},
        importance=permutation_importance(predictor, test),
        rows={str(split): count for split, count in source.counts.items()},
    )
    report.plots = _plots(report, cells, probs, predictor.config.edges, folder / "plots")
    for name, text in (
        ("report.json", json.dumps(report.to_dict(), indent=2) + "\n"),
        ("report.md", report.markdown()),
    ):
        scratch = folder / f".{name}.writing"
        scratch.write_text(text)
        scratch.replace(folder / name)
    return report


def _plots(report: Report, cells: Cells, probs: dict[str, Array], edges: tuple[int, ...], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    ranked = {name: values for name, values in probs.items() if not math.isnan(report.scores[name].auroc)}
    return [
        plot_reliability(cells, probs[LEARNED], folder / "reliability.png"),
        plot_roc(cells, ranked, folder / "roc.png"),
        plot_acceptance(cells, probs[LEARNED], edges, folder / "acceptance.png"),
        plot_importance(report.importance, folder / "importance.png"),
    ]
