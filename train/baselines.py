"""What scikit-learn makes of the same traces: base rates, logistic regression, histogram gradient boosting.

Each predicts P(success at width w with m candidates) from a layer's features, w and m, on the cells of the grid that
were observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from beamwise.controller.predictor import PredictorConfig

from .module import rows_outcomes
from .rows import Rows

Array = np.ndarray


@dataclass(frozen=True)
class Cells:
    """C observed cells (layer, width, draft width).

    Attributes:
        row: int (C,), index of the layer.
        width: int (C,), from 1.
        column: int (C,), index of the draft width among the edges.
        label: bool (C,), covered.
    """

    row: Array
    width: Array
    column: Array
    label: Array

    def pick(self, index: Array) -> Cells:
        """The cells at an index or mask."""
        return Cells(self.row[index], self.width[index], self.column[index], self.label[index])


def observed_cells(rows: Rows, config: PredictorConfig) -> Cells:
    """The cells of the grid whose outcome was observed, in order."""
    outcomes = rows_outcomes(rows, config)
    row, width, column = outcomes.known.nonzero(as_tuple=True)
    label = outcomes.success[row, width, column]
    return Cells(row.numpy(), width.numpy() + 1, column.numpy(), label.numpy())


class Classifier(Protocol):
    """The part of scikit-learn's interface that is used."""

    classes_: Array

    def fit(self, inputs: Array, labels: Array) -> object: ...

    def predict_proba(self, inputs: Array) -> Array: ...


class Baseline:
    """A scikit-learn classifier on (features, w, m).

    Args:
        classifier: not fitted yet.
        config: the grid.
        most_cells: training cells beyond these are left out, at random.
    """

    def __init__(self, classifier: Classifier, config: PredictorConfig, most_cells: int = 300_000) -> None:
        self.classifier, self.config, self.most_cells = classifier, config, most_cells

    def fit(self, rows: Rows, cells: Cells) -> Baseline:
        """Fit on training cells; returns itself."""
        if len(cells.row) > self.most_cells:
            cells = cells.pick(np.random.default_rng(0).permutation(len(cells.row))[: self.most_cells])
        self.classifier.fit(self._inputs(rows, cells), cells.label)
        return self

    def predict(self, rows: Rows, cells: Cells) -> Array:
        """P(success) of cells, float (C,)."""
        probs = self.classifier.predict_proba(self._inputs(rows, cells))
        hit = np.flatnonzero(self.classifier.classes_)  # no success at all in training: probability 0
        return probs[:, hit[0]] if len(hit) else np.zeros(len(cells.row))

    def _inputs(self, rows: Rows, cells: Cells) -> Array:
        """Features, w, log m, and an indicator of each m, float32 (C, F + 2 + J)."""
        edges = np.log2(np.array(self.config.edges, dtype=np.float32))
        columns = np.eye(len(edges), dtype=np.float32)[cells.column]
        numbers = np.stack([cells.width.astype(np.float32), edges[cells.column]], axis=1)
        return np.concatenate([rows.features.numpy()[cells.row], numbers, columns], axis=1)


class BaseRate:
    """The share of successes at the same (beams, w, m) in training, whatever the features.

    Args:
        config: the grid.
    """

    def __init__(self, config: PredictorConfig) -> None:
        self.shape = (config.max_width + 1, config.max_width + 1, len(config.edges))

    def fit(self, rows: Rows, cells: Cells) -> BaseRate:
        """Count training cells; returns itself."""
        hits, counts = np.zeros(self.shape), np.zeros(self.shape)
        where = self._where(rows, cells)
        np.add.at(hits, where, cells.label)
        np.add.at(counts, where, 1)
        self.rates = (hits + 0.5) / (counts + 1.0)
        return self

    def predict(self, rows: Rows, cells: Cells) -> Array:
        """P(success) of cells, float (C,)."""
        rates: Array = self.rates[self._where(rows, cells)]
        return rates

    def _where(self, rows: Rows, cells: Cells) -> tuple[Array, Array, Array]:
        return rows.num_beams.numpy()[cells.row], cells.width, cells.column


def fit_baselines(rows: Rows, config: PredictorConfig) -> dict[str, Baseline | BaseRate]:
    """The three baselines, fitted on training rows."""
    cells = observed_cells(rows, config)
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    boosting = HistGradientBoostingClassifier(early_stopping=True, random_state=0)
    return {
        "base rate": BaseRate(config).fit(rows, cells),
        "logistic regression": Baseline(logistic, config).fit(rows, cells),
        "gradient boosting": Baseline(boosting, config).fit(rows, cells),
    }
