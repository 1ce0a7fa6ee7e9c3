"""The learned policy: it drafts where that pays, and only looks at what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from beamwise.controller.latency import LatencyProfile
from beamwise.controller.policy import LearnedWidth
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import AskingPlanner, LayerPlan, LayerView

EDGES = (2, 4, 8)
PROFILE = LatencyProfile((1, 2, 4, 8, 16, 32), (20.0, 20.5, 21.0, 23.0, 27.0, 35.0), (2.0,) * 6)
STEEP = dataclasses.replace(PROFILE, target_ms=(20.0, 22.0, 26.0, 34.0, 50.0, 82.0), ask_ms=0.2)
"""Candidates that fail cost much more than an ask."""
DEAR_TARGET = LatencyProfile((1, 32), (50.0, 50.5), (0.1, 0.1))
DEAR_DRAFT = LatencyProfile((1, 32), (20.0, 35.0), (60.0, 60.0))


class FixedNet:
    """A network on the host whose probabilities do not depend on the features."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._rows = np.array(rows, dtype=np.float32)

    def success_probs(self, features: np.ndarray, num_beams: int) -> np.ndarray:
        return self._rows[:num_beams]


def constant_predictor(prior: list[float], full: list[list[float]]) -> WidthPredictor:
    """Success probabilities that do not depend on the features: the same rows for each width, or one for all."""
    predictor = WidthPredictor(PredictorConfig(max_width=len(full), edges=EDGES, hidden=2))

    def fixed(rows: list[list[float]]) -> object:
        return lambda features: torch.tensor([rows]).expand(len(features), -1, -1)

    predictor.prior.success_probs = fixed([prior] * len(full))  # type: ignore[assignment]
    predictor.full.success_probs = fixed(full)  # type: ignore[assignment]
    predictor.prior.on_host = lambda: FixedNet([prior] * len(full))  # type: ignore[assignment,return-value]
    predictor.full.on_host = lambda: FixedNet(full)  # type: ignore[assignment,return-value]
    return predictor


class Views:
    """Layer views of one prompt that record what was asked for."""

    def __init__(self, num_beams: int) -> None:
        self.num_beams = num_beams
        self.drafts = 0
        self.notes: dict[str, object] = {}
        self.outcomes: tuple[bool, ...] = ()

    def view(self, layer: int, parents: int) -> LayerView:
        def draft() -> torch.Tensor:
            self.drafts += 1
            return torch.zeros(len(FEATURE_NAMES))

        context = torch.zeros(len(CONTEXT_NAMES))
        return LayerView(layer, self.num_beams, parents, lambda: context, draft, 0, self.outcomes, self.notes)


def plan(policy: LearnedWidth, views: Views) -> list[LayerPlan]:
    planner = policy.start_block(views.num_beams)
    plans: list[LayerPlan] = []
    while True:
        parents = plans[-1].draft_width if plans else views.num_beams
        chosen = planner.next_layer(views.view(len(plans), parents))
        if chosen is None:
            return plans
        plans.append(chosen)


def plan_by_asking(policy: LearnedWidth, views: Views) -> list[LayerPlan]:
    planner = policy.start_block(views.num_beams)
    assert isinstance(planner, AskingPlanner)
    plans: list[LayerPlan] = []
    while True:
        parents = plans[-1].draft_width if plans else views.num_beams
        question = planner.ask(views.view(len(plans), parents))
        chosen = question and question.decide([tensor.tolist() for tensor in question.tensors])
        if question is None or chosen is None:
            return plans
        assert chosen.draft_width <= question.draft_width
        plans.append(chosen)


def settle(policy: LearnedWidth, views: Views, blocks: int = 200) -> list[LayerPlan]:
    for _ in range(blocks):
        plans = plan(policy, views)
    return plans


SURE = [[0.95, 0.96, 0.97]] * 2
HOPELESS = [[0.01, 0.02, 0.03]] * 2


def test_drafts_deep_and_narrow_where_success_is_sure() -> None:
    policy = LearnedWidth(constant_predictor(SURE[0], SURE), PROFILE, max_gamma=5)
    plans = settle(policy, Views(2))
    assert len(plans) == 5
    assert all(item == LayerPlan(width=2, draft_width=2) for item in plans)


def test_drafts_wide_where_only_width_succeeds() -> None:
    probs = [[0.01, 0.1, 0.9]] * 2
    plans = settle(LearnedWidth(constant_predictor(probs[0], probs), PROFILE), Views(2))
    assert plans
    assert all(item.draft_width == 8 for item in plans)


def test_saves_the_draft_where_it_cannot_pay() -> None:
    views = Views(2)
    assert settle(LearnedWidth(constant_predictor(HOPELESS[0], HOPELESS), PROFILE), views) == []
    assert 1 <= views.drafts <= 8  # of 200 blocks: in the first, then ever more rarely, lest the prior is wrong here
    views = Views(2)
    assert settle(LearnedWidth(constant_predictor(SURE[0], SURE), DEAR_DRAFT), views) == []
    assert views.drafts == 0


def test_a_prior_that_is_wrong_about_a_prompt_learns_it() -> None:
    doubtful = [0.1, 0.11, 0.12]
    policy = LearnedWidth(constant_predictor(doubtful, SURE), PROFILE)
    views = Views(2)
    assert all(plan(policy, views) for _ in range(20))
    assert settle(LearnedWidth(constant_predictor(doubtful, HOPELESS), PROFILE), Views(2)) == []


def test_the_full_network_may_still_refuse() -> None:
    views = Views(2)
    assert plan(LearnedWidth(constant_predictor(SURE[0], HOPELESS), PROFILE), views) == []
    assert views.drafts == 1


def test_asking_the_device_plans_as_the_full_network_does() -> None:
    """Without the prior: the draft runs wherever a certain layer would be worth it."""
    for full in (SURE, HOPELESS):
        policies = [LearnedWidth(constant_predictor(SURE[0], full), PROFILE, max_gamma=3) for _ in range(2)]
        told, asked = Views(2), Views(2)
        for _ in range(20):
            assert plan_by_asking(policies[1], asked) == plan(policies[0], told)
        assert asked.drafts == told.drafts
    dear = Views(2)
    assert plan_by_asking(LearnedWidth(constant_predictor(SURE[0], SURE), DEAR_DRAFT), dear) == []
    assert dear.drafts == 0


def test_limits() -> None:
    policy = LearnedWidth(
        constant_predictor([0.0, 0.5, 0.99], [[0.0, 0.5, 0.99]]), PROFILE, max_draft_width=4, max_gamma=1
    )
    plans = plan(policy, Views(1))
    assert plans == [LayerPlan(width=1, draft_width=4)]


@pytest.mark.parametrize(("quality", "min_width", "width"), [(0.0, 1, 1), (0.5, 1, 2), (1.0, 1, 3), (0.0, 3, 3)])
def test_dynamic_widths_follow_the_price_of_narrow_layers(quality: float, min_width: int, width: int) -> None:
    """Worth of widths 1, 2, 3, 4 at quality 0.5: 0.5, 0.83, 0.94, 1; at 1: 0, 0.67, 0.89, 1."""
    rows = [[0.9, 0.9, 0.9], [0.88, 0.88, 0.88], [0.7, 0.7, 0.7], [0.4, 0.4, 0.4]]
    policy = LearnedWidth(
        constant_predictor(rows[0], rows), PROFILE, "dynamic", quality=quality, min_width=min_width, max_gamma=1
    )
    assert plan(policy, Views(4)) == [LayerPlan(width=width, draft_width=2)]


def test_exact_mode_counts_on_all_beams() -> None:
    rows = [[0.99, 0.99, 0.99], [0.0, 0.0, 0.01]]
    policy = LearnedWidth(constant_predictor(rows[0], rows), PROFILE, max_gamma=1)
    assert plan(policy, Views(2)) == []
    assert plan(policy, Views(1)) == [LayerPlan(width=1, draft_width=2)]


def test_the_fixed_point_beats_every_fixed_setting() -> None:
    """Layers covered with probability 0.6 by 4 candidates: the settled plan has the best rate of all (gamma, m)."""
    probs = [0.3, 0.6, 0.65]

    def rate(plans: list[int]) -> float:
        layers, reach, ms, tokens, parents = 1.0, 1.0, 0.0, 1, 1
        for width in plans:
            reach *= probs[EDGES.index(width)]
            layers += reach
            ms += PROFILE.draft(parents)
            parents = width
            tokens += width
        return layers / (ms + PROFILE.target(tokens))

    best = max(rate([width] * gamma) for width in EDGES for gamma in range(9))
    plans = settle(LearnedWidth(constant_predictor(probs, [probs]), PROFILE), Views(1), blocks=600)
    assert rate([item.draft_width for item in plans]) >= 0.99 * best


@pytest.mark.parametrize("do_sample", [False, True])
def test_exact_mode_changes_nothing_but_the_speed(do_sample: bool, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """The same tokens with the controller in the engine as without any draft, whatever the predictor says."""
    target, draft = tiny_llama(0), tiny_llama(1)
    torch.manual_seed(0)
    policy = LearnedWidth(WidthPredictor(PredictorConfig(max_width=3)), DEAR_TARGET, max_gamma=3)
    outputs, drafted = [], []
    for beams in (
        SpeculativeBeams(draft, drafter="model", policy=policy, seed=1),
        SpeculativeBeams(drafter="none", seed=1),
    ):
        sampling = {"top_k": None} if do_sample else {}
        settings = {"num_beams": 3, "do_sample": do_sample, "max_new_tokens": 24, **sampling}
        prompt = torch.tensor([[3, 4, 5]])
        outputs.append(
            target.generate(prompt, custom_generate=beams, attention_mask=torch.ones_like(prompt), **settings)
        )
        drafted.append(beams.stats.drafted_nodes)
    assert torch.equal(*outputs)
    assert drafted[0] > drafted[1] == 0


def test_bad_settings() -> None:
    predictor = constant_predictor(SURE[0], SURE)
    for settings, message in (
        ({"mode": "other"}, "use exact or dynamic"),
        ({"quality": 1.5}, "between 0"),
        ({"min_width": 0}, "at least 1"),
        ({"max_gamma": 0}, "at least 1"),
        ({"max_draft_width": 1}, "smallest is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            LearnedWidth(predictor, PROFILE, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_beams is 3"):
        LearnedWidth(predictor, PROFILE).start_block(3)
