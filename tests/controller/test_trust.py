"""A prompt unlike the training prompts: the controller notices, and only there."""

from __future__ import annotations

import pytest
import torch

from beamwise.controller.policy import LearnedWidth
from beamwise.controller.trust import Promises, PromptTrust
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import LayerView
from tests.conftest import make_tiny_llama
from tests.controller.test_policy import PROFILE, SURE, constant_predictor


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


def test_promises_that_are_kept_change_nothing() -> None:
    promises = Promises(doubt=2.0)
    assert promises.factor == 1.0
    for outcome in (1.0, 0.0, 1.0, 0.0):
        promises.add(0.5, outcome)
    assert promises.factor == pytest.approx(1.0)
    for _ in range(4):
        promises.add(0.9, 0.0)
    assert promises.factor == pytest.approx(4.0 / 7.6)


def test_old_promises_fade() -> None:
    trust = PromptTrust()
    trust.planned = [0.9, 0.9, 0.9]
    trust.begin([False])  # the others were not reached: they promised nothing
    assert trust.full.factor == pytest.approx(2.0 / 2.9)
    for _ in range(500):
        trust.begin([])
    assert trust.full.factor == pytest.approx(1.0, abs=1e-3)


def test_broken_promises_end_drafting_in_that_prompt_alone() -> None:
    policy = LearnedWidth(constant_predictor(SURE[0], SURE), PROFILE, max_gamma=3)
    bad: dict[str, object] = {}
    good: dict[str, object] = {}
    depths = [block(policy, bad, (False,))[0] for _ in range(40)]
    assert depths[0] == 3
    assert depths[-1] < 3
    assert [block(policy, good, (True,) * 3)[0] for _ in range(40)][-1] == 3


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
