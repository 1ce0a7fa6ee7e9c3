"""A prompt unlike the training prompts: the controller notices, and only there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from beamwise.controller.frailty import Frailty, PromptFrailty
from beamwise.controller.policy import LearnedWidth
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import LayerView
from tests.conftest import make_tiny_llama
from tests.controller.test_policy import PROFILE, STEEP, SURE, constant_predictor


def block(
    policy: LearnedWidth, notes: dict[str, object], outcomes: tuple[bool, ...], beams: int = 2
) -> tuple[int, int]:
    """(layers drafted, draft forwards) of a block that begins after one with these outcomes."""
    drafts, layer = 0, 0
    planner = policy.start_block(beams)
    while True:

        def draft() -> torch.Tensor:
            nonlocal drafts
            drafts += 1
            return torch.zeros(len(FEATURE_NAMES))

        view = LayerView(layer, beams, 2, lambda: torch.zeros(len(CONTEXT_NAMES)), draft, 0, outcomes, notes)
        if planner.next_layer(view) is None:
            return layer, drafts
        layer += 1


def test_outcomes_as_expected_change_little() -> None:
    frailty = Frailty(spread=0.5)
    probs = np.array([0.0, 0.2, 0.9])
    assert frailty.applied(probs) == pytest.approx(probs, abs=1e-9)
    for outcome in (1.0, 0.0) * 20:
        frailty.update(0.5, outcome)
    assert frailty.applied(np.array([0.5])) == pytest.approx([0.5], abs=0.03)


def test_the_estimate_is_the_most_likely_one() -> None:
    """Against the posterior's maximum on a grid: 60 layers of a prompt whose hazards are 0.4 of what is promised."""
    generator = np.random.default_rng(0)
    promised = generator.uniform(0.2, 0.95, 60)
    outcomes = generator.random(60) < 1.0 - (1.0 - promised) ** 0.4
    frailty = Frailty(spread=0.5)
    for prob, outcome in zip(promised, outcomes, strict=True):
        frailty.update(float(prob), float(outcome))
    grid = np.linspace(-2.0, 1.0, 3001)
    covered = 1.0 - (1.0 - promised) ** np.exp(grid)[:, None]
    posterior = np.log(np.where(outcomes, covered, 1.0 - covered)).sum(1) - 0.5 * (grid / 0.5) ** 2
    assert frailty.log == pytest.approx(grid[posterior.argmax()], abs=0.1)
    assert -1.3 < frailty.log < -0.4


def test_a_surprise_moves_it_further_and_the_first_ones_most() -> None:
    moves = []
    for prob in (0.1, 0.5, 0.9):
        frailty = Frailty(spread=0.5)
        frailty.update(prob, 0.0)
        moves.append(-frailty.log)
    assert moves[0] < moves[1] < moves[2]
    before = frailty.log
    frailty.update(0.9, 0.0)
    assert 0.0 < before - frailty.log < moves[2]


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_certainty_leaves_it_finite(prob: float) -> None:
    frailty = Frailty(spread=0.9)
    for outcome in (1.0, 0.0) * 50:
        frailty.update(prob, outcome)
        assert abs(frailty.log) <= 3.0
        assert 0.0 <= frailty.applied_to(prob) <= 1.0
        assert frailty.applied(np.array([prob])) == pytest.approx([frailty.applied_to(prob)])


def test_layers_that_were_not_reached_say_nothing_and_old_ones_less() -> None:
    frailty = PromptFrailty()
    frailty.planned = [0.9, 0.9, 0.9]
    frailty.begin([False])
    once = Frailty(spread=frailty.full.spread)
    once.update(0.9, 0.0)
    assert frailty.full == once
    for _ in range(500):
        frailty.begin([])
    assert frailty.full.log == once.log
    assert frailty.full.information < 1e-3


def test_broken_promises_end_drafting_in_that_prompt_alone() -> None:
    policy = LearnedWidth(constant_predictor(SURE[0], SURE), PROFILE, max_gamma=3)
    bad: dict[str, object] = {}
    good: dict[str, object] = {}
    depths = [block(policy, bad, (False,))[0] for _ in range(40)]
    assert depths[0] == 3
    assert depths[-1] < 3
    assert [block(policy, good, (True,) * 3)[0] for _ in range(40)][-1] == 3


def test_a_prompt_that_becomes_easy_is_noticed() -> None:
    """Its first layers fail, so the prior sees no hope any more; looks at the draft find that it is worth it again."""
    policy = LearnedWidth(constant_predictor([0.5] * 3, [[0.6] * 3] * 2), STEEP, max_gamma=1)
    notes: dict[str, object] = {}
    hard = [block(policy, notes, (False,))[0] for _ in range(40)]
    assert hard[0] == 1
    assert sum(hard[-10:]) <= 4
    easy = [block(policy, notes, (True,))[0] for _ in range(100)]
    assert sum(easy[-20:]) >= 18


def test_looks_become_rarer_until_something_is_drafted() -> None:
    frailty, looks = PromptFrailty(), []
    for number in range(70):
        frailty.begin([])
        if frailty.look():
            looks.append(number)
    assert looks == [0, 4, 12, 28, 60]
    frailty.planned = [0.5]
    frailty.begin([True])
    assert not frailty.look()
    for _ in range(4):
        frailty.begin([])
    assert frailty.look()


def test_the_prior_learns_from_the_full_network() -> None:
    """It said yes to drafts of which the full network then thought nothing: after a few, the draft is not run."""
    policy = LearnedWidth(constant_predictor([0.6] * 3, [[0.02] * 3] * 2), PROFILE)
    notes: dict[str, object] = {}
    drafts = [block(policy, notes, ())[1] for _ in range(20)]
    assert drafts[0] == 1
    assert sum(drafts) <= 10


def test_decoding_tells_the_policy_what_came_of_its_layers() -> None:
    """A draft that has nothing to do with its target: the controller, however sure, gives up. The text stays."""
    target, draft = make_tiny_llama(0, vocab_size=40), make_tiny_llama(1, vocab_size=40)
    policy = LearnedWidth(constant_predictor(SURE[0], SURE), PROFILE, max_gamma=2)
    depths: list[int] = []
    beams = SpeculativeBeams(draft, "model", policy=policy, observer=lambda record: depths.append(len(record.layers)))
    ids = torch.tensor([[3, 4, 5]])
    arguments = {"num_beams": 2, "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    ours = target.generate(ids, **arguments, custom_generate=beams)  # type: ignore[operator]
    assert torch.equal(ours, target.generate(ids, **arguments))  # type: ignore[operator]
    assert depths[0] == 2
    assert sum(depths[-10:]) < 10
