"""The public decoder with a controller: which profile it plans by, and that its output is that of the target alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from beamwise import SpeculativeBeams
from beamwise.controller.checkpoint import Controller
from beamwise.controller.policy import LearnedWidth
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.widths import FixedWidth
from tests.controller.test_checkpoint import PROFILE, make_controller

FLOAT32 = replace(PROFILE, dtype="float32", block_ms=1.0)
GIVEN = replace(PROFILE, block_ms=5.0)


@pytest.fixture
def controller() -> Controller:
    made = make_controller()
    made.add_profile(FLOAT32)
    return made


def policy_of(beams: SpeculativeBeams, model: LlamaForCausalLM) -> LearnedWidth:
    policy = beams.engine(model, 2).policy
    assert isinstance(policy, LearnedWidth)
    return policy


def test_it_plans_by_the_profile_of_the_targets_dtype(
    controller: Controller, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    single, double = tiny_llama(dtype=torch.float32), tiny_llama(dtype=torch.float64)
    controller.save_pretrained(tmp_path / "controller")
    beams = SpeculativeBeams(drafter="lookup", controller=tmp_path / "controller")
    first = policy_of(beams, single)
    assert first.profile == FLOAT32
    assert policy_of(beams, double).profile == PROFILE
    assert policy_of(beams, single) is first  # its running averages are kept
    GIVEN.save(tmp_path / "profile.json")
    for given in (GIVEN, tmp_path / "profile.json"):
        assert policy_of(SpeculativeBeams(controller=controller, profile=given), single).profile == GIVEN


def test_the_controller_changes_no_token(controller: Controller, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, ids = tiny_llama(), torch.tensor([[5, 9, 5, 9, 5]])
    arguments = {"num_beams": 2, "max_new_tokens": 24, "do_sample": True}
    texts, drafted = [], []
    for beams in (
        SpeculativeBeams(tiny_llama(), "model", controller, seed=3),
        SpeculativeBeams(drafter="none", seed=3),
    ):
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=beams, **arguments))
        drafted.append(beams.stats.draft_forwards)
    assert torch.equal(*texts)
    assert drafted[0] > 0 == drafted[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controller": make_controller(), "policy": FixedWidth(1, 4)}, "both given"),
        ({"profile": PROFILE}, "without a controller"),
        ({"controller": make_controller(None)}, "no latency profile"),
        ({"controller": make_controller(), "quality": 2.0, "width_mode": "dynamic"}, "quality is 2.0"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeBeams(drafter="lookup", **settings)
