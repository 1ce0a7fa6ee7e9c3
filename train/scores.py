"""How good probabilities of yes-or-no outcomes are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics import Metric

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


class CalibrationError(Metric):
    """`calibration_error` batch by batch and over processes, in memory that does not grow with the rows.

    Args:
        bins: equal-width bins.
    """

    sums: torch.Tensor

    def __init__(self, bins: int = 15) -> None:
        super().__init__()
        self.bins = bins
        self.add_state("sums", torch.zeros(3, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add probabilities, float (N,), and outcomes, integer or bool (N,)."""
        index = (probs * self.bins).long().clamp_max(self.bins - 1)
        values = torch.stack([torch.ones_like(probs), probs, labels.to(probs.dtype)])
        self.sums.index_add_(1, index, values.to(self.sums.dtype))

    def compute(self) -> torch.Tensor:
        """Float (); 0 where nothing was added."""
        counts, predicted, observed = self.sums
        error: torch.Tensor = (predicted - observed).abs().sum() / counts.sum().clamp_min(1)
        return error.float()
