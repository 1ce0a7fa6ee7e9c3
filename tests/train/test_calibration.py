"""Calibration and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from beamwise.controller.predictor import PredictorConfig, WidthPredictor, censored_nll
from beamwise.decoding.features import FEATURE_NAMES
from beamwise.train.calibration import calibrate
from beamwise.train.module import rows_outcomes
from beamwise.train.rows import TraceSource
from beamwise.train.scores import CalibrationError, calibration_error, reliability, score


def test_repairs_overconfidence(traces: Path) -> None:
    """A predictor whose last layer was sharpened and shifted is brought back."""
    torch.manual_seed(0)
    rows = TraceSource([str(traces)], (0.15, 0.2), 0, 10**6).load("val")
    predictor = WidthPredictor(PredictorConfig(max_width=4))
    outcomes = rows_outcomes(rows, predictor.config)

    @torch.inference_mode()
    def nll(predictor: WidthPredictor) -> float:
        return float(censored_nll(predictor.full(rows.features), outcomes))

    before = nll(predictor)
    calibrate(predictor, rows)
    fitted = nll(predictor)
    assert fitted < before
    with torch.no_grad():
        last = predictor.full.layers[-1]
        last.weight[: predictor.full.bins].mul_(3.0)
        last.bias[: predictor.full.bins].mul_(3.0).add_(1.0)
    calibrate(predictor, rows)
    assert nll(predictor) < before
    probs = predictor(torch.randn(20, len(FEATURE_NAMES)))
    assert (probs.diff(dim=2) >= -1e-6).all()
    assert (probs.diff(dim=1) <= 1e-6).all()


def test_scores_by_hand() -> None:
    probs, labels = np.array([0.9, 0.9, 0.1, 0.1]), np.array([True, False, False, False])
    found = score(probs, labels)
    assert found.brier == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert found.nll == pytest.approx(-(3 * np.log(0.9) + np.log(0.1)) / 4)
    assert found.ece == pytest.approx((0.4 * 2 + 0.1 * 2) / 4)
    assert found.auroc == pytest.approx(2.5 / 3)
    predicted, observed, counts = reliability(probs, labels)
    assert predicted.tolist() == pytest.approx([0.1, 0.9])
    assert observed.tolist() == pytest.approx([0.0, 0.5])
    assert counts.tolist() == [2, 2]


def test_one_kind_of_outcome_has_no_ranking() -> None:
    assert np.isnan(score(np.array([0.5, 0.6]), np.array([True, True])).auroc)


def test_calibrated_draws_have_a_small_error() -> None:
    generator = np.random.default_rng(0)
    probs = generator.random(100_000)
    assert calibration_error(probs, generator.random(100_000) < probs) < 0.01


def test_calibration_error_in_parts_is_that_of_the_whole() -> None:
    generator = np.random.default_rng(1)
    probs = generator.random(1_000).astype(np.float32)
    labels = generator.random(1_000) < probs**2
    metric = CalibrationError()
    assert float(metric.compute()) == 0.0
    for part in np.array_split(np.arange(1_000), 7):
        metric.update(torch.from_numpy(probs[part]), torch.from_numpy(labels[part]))
    assert float(metric.compute()) == pytest.approx(calibration_error(probs, labels), abs=1e-6)
