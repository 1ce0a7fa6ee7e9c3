"""How good probabilities of yes-or-no outcomes are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import roc_auc_score

Array = np.ndarray


@dataclass(frozen=True)
class Scores:
    """Scores of N predicted probabilities.

    Attributes:
        auroc: chance that a success was given more than a failure; NaN where only one kind occurs.
        brier: mean squared error.
        ece: expected calibration error: mean gap between predicted and observed rate over 15 equal-width bins.
        nll: mean negative log-likelihood, nats.
        count: N.
    """

    auroc: float
    brier: float
    ece: float
    nll: float
    count: int


def score(probs: Array, labels: Array) -> Scores:
    """Score probabilities, float (N,), against outcomes, bool (N,)."""
    probs, labels = probs.astype(np.float64), labels.astype(bool)
    inside = probs.clip(1e-6, 1.0 - 1e-6)
    return Scores(
        auroc=float(roc_auc_score(labels, probs)) if labels.any() and not labels.all() else float("nan"),
        brier=float(np.mean((probs - labels) ** 2)),
        ece=calibration_error(probs, labels),
        nll=float(-np.mean(np.where(labels, np.log(inside), np.log1p(-inside)))),
        count=len(probs),
    )


def calibration_error(probs: Array, labels: Array, bins: int = 15) -> float:
    """Expected calibration error of probabilities (N,) against outcomes (N,), over equal-width bins."""
    predicted, observed, counts = reliability(probs, labels, bins)
    return float(np.sum(counts * np.abs(predicted - observed)) / max(counts.sum(), 1))


def reliability(probs: Array, labels: Array, bins: int = 15) -> tuple[Array, Array, Array]:
    """Mean prediction, observed rate and count of each bin that is not empty, float (B,) each."""
    index = np.minimum((probs * bins).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins).astype(np.float64)
    used = counts > 0
    predicted = np.bincount(index, weights=probs, minlength=bins)[used] / counts[used]
    observed = np.bincount(index, weights=labels.astype(np.float64), minlength=bins)[used] / counts[used]
    return predicted, observed, counts[used]
