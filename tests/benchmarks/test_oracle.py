"""The oracle: surveys every position, plans a shortest path, and its plan does what it says."""

from __future__ import annotations

from typing import Any

import torch

from beamwise.benchmarks.oracle import Start, Survey, best_plan
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import FixedWidth, WidthPolicy
from tests.conftest import make_tiny_llama

PROFILE = LatencyProfile((1, 8, 64), (10.0, 12.0, 30.0), (1.0, 1.0, 1.2))


def test_a_shortest_path() -> None:
    """Two layers at once pay; a layer that needs 60 candidates does not."""
    starts = {0: Start(1, (2, 2)), 1: Start(2, (60,)), 2: Start(2, ()), 3: Start(2, ())}
    assert best_plan(starts, 3, PROFILE).plans == {0: (2, 2), 1: (), 2: ()}
    assert best_plan({}, 2, PROFILE).plans == {0: (), 1: ()}


def test_the_survey_finds_what_every_position_accepts() -> None:
    target, draft = make_tiny_llama(0, vocab_size=24, scale=0.3), make_tiny_llama(0, vocab_size=24, scale=0.3)
    noise = torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.02 * noise)
    beams = SpeculativeBeams(draft, "model", seed=4)

    def decode(policy: WidthPolicy, observer: Any = None) -> torch.Tensor:
        custom = SpeculativeBeams(draft, "model", policy=policy, observer=observer, seed=4)
        output = target.generate(
            torch.tensor([[2, 3, 5]]), num_beams=2, do_sample=True, max_new_tokens=20, custom_generate=custom
        )
        beams.stats = custom.stats
        return output

    survey = Survey(gamma=4, draft_width=8)
    texts = []

    def again() -> int:
        texts.append(decode(survey, survey))
        return beams.stats.layers

    layers = survey.explore(again)
    assert sorted(survey.starts) == list(range(layers))
    assert all(torch.equal(text, texts[0]) for text in texts)
    oracle = best_plan(survey.starts, layers, PROFILE)
    assert torch.equal(decode(oracle), texts[0])
    blocks, nodes = beams.stats.target_forwards, beams.stats.drafted_nodes
    planned, position = 0, 0
    while position < layers:  # what the plan drafts is accepted, but for rare blocks that stop a layer short
        position += len(oracle.plans[position]) + 1
        planned += 1
    assert planned <= blocks <= planned + 1
    decode(FixedWidth(4, 8))
    assert nodes < beams.stats.drafted_nodes
