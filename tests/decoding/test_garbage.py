"""A decoder leaves no circles of references behind: its tensors go at once, not whenever garbage is collected."""

from __future__ import annotations

import gc
from typing import Any, Literal, cast

import pytest
import torch

from beamwise.controller.latency import LatencyProfile
from beamwise.controller.policy import LearnedWidth
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import FixedWidth, WidthPolicy
from tests.conftest import make_tiny_llama


@pytest.mark.parametrize("decoding", ["greedy", "sampling", "rejection"])
@pytest.mark.parametrize("kind", ["pruned", "feature"])
@pytest.mark.parametrize("planned", ["fixed", "learned"])
def test_no_tensor_waits_for_the_collector(planned: str, kind: str, decoding: str) -> None:
    do_sample = decoding != "greedy"
    verification: Literal["coupled", "rejection"] = "rejection" if decoding == "rejection" else "coupled"
    torch.manual_seed(0)
    target = make_tiny_llama(11, vocab_size=24, layers=3)
    profile = LatencyProfile((1, 32), (20.0, 22.0), (0.5, 0.6))
    predictor = WidthPredictor(PredictorConfig(max_width=3, edges=(2, 4, 8), hidden=4))
    policy: WidthPolicy = FixedWidth(2, 5) if planned == "fixed" else LearnedWidth(predictor, profile, max_gamma=2)
    beams = SpeculativeBeams(
        build_draft(target, kind, [0, 2], torch.arange(1, 24, 2)),
        "union",
        policy=policy,
        seed=1,
        batch_size=2,
        verification=verification,
    )
    prompts = torch.tensor([[3, 4, 5], [9, 8, 7], [2, 2, 2]])

    def run() -> None:
        cast(Any, target).generate(
            prompts, num_beams=3, max_new_tokens=12, do_sample=do_sample, eos_token_id=5, custom_generate=beams
        )

    run()  # what the libraries make once
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        run()
        gc.collect()
        tensors = [item for item in gc.garbage if isinstance(item, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert tensors == []
