"""Calibration of a trained predictor on validation rows.

A temperature on the hazards' logits and a shift for each bin of candidate counts: a monotone map of each hazard, the
same at every width, so that probabilities stay monotone in both directions. Both live in the predictor's buffers and
travel with it.
"""

from __future__ import annotations

import torch

from beamwise.controller.predictor import HazardNet, Outcomes, WidthPredictor, censored_nll
from beamwise.decoding.features import CONTEXT_NAMES

from .module import rows_outcomes
from .rows import Rows


def calibrate(predictor: WidthPredictor, rows: Rows) -> None:
    """Fit the calibration of both networks to rows that they were not trained on, in place."""
    outcomes = rows_outcomes(rows, predictor.config)
    _fit(predictor.full, rows.features, outcomes)
    _fit(predictor.prior, rows.features[:, : len(CONTEXT_NAMES)], outcomes)


def _fit(net: HazardNet, features: torch.Tensor, outcomes: Outcomes) -> None:
    """Maximise the censored likelihood over log temperature and shifts, with a standard normal prior on each."""
    with torch.inference_mode():
        raw = net.raw_logits(features)
    raw = raw.clone()
    parameters = torch.zeros(1 + net.bins, requires_grad=True)
    optimiser = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        logits = raw * parameters[:1].exp() + parameters[1:]
        value = censored_nll(logits, outcomes) + 0.5 * parameters.square().sum() / len(features)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    net.scale.copy_(parameters[:1].detach().exp())
    net.shift.copy_(parameters[1:].detach())
