"""The predictor: monotone both ways whatever its weights, and a likelihood that handles censoring."""

from __future__ import annotations

import math

import pytest
import torch

from beamwise.controller.predictor import (
    Outcomes,
    PredictorConfig,
    WidthPredictor,
    censored_nll,
    grid_outcomes,
    success_from_logits,
)
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES

EDGES = (1, 2, 4, 8)


def outcome(needed: list[int], limit: int, num_beams: int | None = None) -> Outcomes:
    beams = len(needed) if num_beams is None else num_beams
    return grid_outcomes(torch.tensor([needed]), torch.tensor([beams]), torch.tensor([limit]), EDGES)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("calibrated", [False, True])
def test_monotone_by_construction(seed: int, calibrated: bool) -> None:
    torch.manual_seed(seed)
    predictor = WidthPredictor(PredictorConfig(max_width=4))
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.normal_(0.0, 1.0)
        if calibrated:
            predictor.full.scale.fill_(0.7)
            predictor.full.shift.normal_()
    probs = predictor(torch.randn(50, len(FEATURE_NAMES)) * 3)
    assert probs.shape == (50, 4, 12)
    assert ((probs >= 0) & (probs <= 1)).all()
    assert (probs.diff(dim=2) >= -1e-6).all()  # more candidates
    assert (probs.diff(dim=1) <= 1e-6).all()  # more beams
    assert predictor.prior_probs(torch.randn(3, len(CONTEXT_NAMES))).shape == (3, 4, 12)


def test_a_few_thousand_parameters() -> None:
    assert sum(parameter.numel() for parameter in WidthPredictor().parameters()) < 8000


def test_outcomes_on_the_grid() -> None:
    seen = outcome([1, 3, 0], limit=4)
    assert seen.event[0].tolist() == [[True, False, False, False], [False, False, True, False], [False] * 4]
    assert seen.survived[0].tolist() == [[False] * 4, [True, True, False, False], [True, True, True, False]]
    assert seen.success[0].tolist() == [[True] * 4, [False, False, True, True], [False] * 4]
    # up to the limit, and not where fewer candidates than beams make it impossible
    assert seen.known[0].tolist() == [
        [True, True, True, False],
        [False, True, True, False],
        [False, False, True, False],
    ]


def test_an_exhausted_draft_is_a_failure_at_any_draft_width() -> None:
    seen = outcome([0], limit=32767)
    assert seen.survived.all()
    assert seen.known.all()


def test_widths_beyond_the_beams_do_not_count() -> None:
    seen = outcome([2, 0], limit=8, num_beams=1)
    assert not seen.known[0, 1].any()
    assert not (seen.survived | seen.event)[0, 1].any()


def test_likelihood_by_hand() -> None:
    hazards = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = torch.logit(hazards).expand(1, 1, 4)
    covered = float(censored_nll(logits, outcome([3], limit=8)))
    assert covered == pytest.approx(-math.log(0.9 * 0.8 * 0.3), rel=1e-5)
    censored = float(censored_nll(logits, outcome([0], limit=4)))
    assert censored == pytest.approx(-math.log(0.9 * 0.8 * 0.7), rel=1e-5)
    beyond = float(censored_nll(logits, outcome([20], limit=32)))
    assert beyond == pytest.approx(-math.log(0.9 * 0.8 * 0.7 * 0.6), rel=1e-5)
    success = success_from_logits(logits)[0, 0]
    assert success.tolist() == pytest.approx([0.1, 0.28, 0.496, 0.6976], rel=1e-5)


def test_statistics_are_part_of_the_model() -> None:
    predictor = WidthPredictor()
    features = torch.randn(4, len(FEATURE_NAMES))
    before = predictor(features)
    predictor.set_statistics(torch.full((len(FEATURE_NAMES),), 5.0), torch.full((len(FEATURE_NAMES),), 2.0))
    torch.testing.assert_close(predictor(features * 2.0 + 5.0), before)
    assert {"full.mean", "full.std", "prior.mean", "full.scale", "full.shift"} <= set(predictor.state_dict())


@pytest.mark.parametrize(
    "changes", [{"max_width": 0}, {"edges": (2, 2)}, {"edges": ()}, {"edges": (0, 1)}, {"hidden": 0}]
)
def test_bad_shapes(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PredictorConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_width", [1, 4])
def test_on_the_host_it_says_the_same(max_width: int) -> None:
    torch.manual_seed(max_width)
    predictor = WidthPredictor(PredictorConfig(max_width=max_width))
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.normal_(0.0, 1.0)
        for net in (predictor.prior, predictor.full):
            net.mean.normal_()
            net.std.uniform_(0.1, 3.0)
            net.scale.fill_(0.7)
            net.shift.normal_()
    for net, count in ((predictor.prior, len(CONTEXT_NAMES)), (predictor.full, len(FEATURE_NAMES))):
        host = net.on_host()
        for features in torch.randn(20, count) * torch.logspace(-2, 3, 20).unsqueeze(1):
            expected = net.success_probs(features.unsqueeze(0))[0]
            for width in range(1, max_width + 1):
                found = torch.from_numpy(host.success_probs(features.numpy(), width))
                torch.testing.assert_close(found, expected[:width], rtol=1e-4, atol=1e-5)
