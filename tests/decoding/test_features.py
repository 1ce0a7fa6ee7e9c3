"""Features: what they say, that they leak nothing of the layer's draw, and that the host never waits for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from beamwise.decoding import drafting
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.features import (
    CONTEXT_NAMES,
    DRAFT_NAMES,
    FEATURE_NAMES,
    FeatureInputs,
    context_features,
    layer_features,
    schema_hash,
)
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import FixedWidth


def make_inputs(parents: int = 5, num_beams: int = 3, seed: int = 0, **changes: Any) -> FeatureInputs:
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {
        "layer": 1,
        "num_beams": num_beams,
        "position": 7,
        "prompt_length": 50,
        "do_sample": True,
        "num_finished": 1,
        "recent_acceptance": 0.4,
        "parent_scores_P": torch.randn(parents, generator=generator) - 6.0,
        "root_scores_L": torch.randn(num_beams, generator=generator).sort(descending=True).values - 4.0,
    }
    return FeatureInputs(**{**values, **changes})


def named(features: torch.Tensor) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, features.tolist(), strict=True))


def log_probs(parents: int, vocab: int, seed: int = 1) -> torch.Tensor:
    return torch.log_softmax(3.0 * torch.randn(parents, vocab, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_schema() -> None:
    assert FEATURE_NAMES == CONTEXT_NAMES + DRAFT_NAMES
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)
    assert len(schema_hash()) == 16


def test_against_plain_formulas() -> None:
    inputs, log_q = make_inputs(), log_probs(5, 100)
    found = named(layer_features(inputs, log_q))
    kept = log_q[:3]  # the first num_beams parents
    weights = torch.softmax(inputs.parent_scores_P[:3], dim=0)
    joint = (weights.unsqueeze(1) * kept.exp()).flatten().sort(descending=True).values
    entropy = -(kept.exp() * kept).sum(1)
    assert found["joint_entropy"] == pytest.approx(float(-(joint * joint.log()).sum()), abs=1e-4)
    for rank in (1, 2, 4, 8, 16, 32):
        assert found[f"joint_mass_{rank}"] == pytest.approx(float(joint[:rank].sum()), abs=1e-5)
    assert found["joint_gap_8"] == pytest.approx(float(joint[2].log() - joint[7].log()), abs=1e-4)
    assert found["draft_entropy"] == pytest.approx(float((weights * entropy).sum()), abs=1e-4)
    assert found["first_top1"] == pytest.approx(float(kept[0].exp().max()), abs=1e-5)
    all_weights = torch.softmax(inputs.parent_scores_P, dim=0)
    assert found["parent_mass"] == pytest.approx(float(all_weights[:3].sum()), abs=1e-5)
    assert found["path_log_prob"] == pytest.approx(
        min(0.0, float(inputs.parent_scores_P[:3].max() - inputs.root_scores_L[0])), abs=1e-5
    )
    assert found["log_position"] == pytest.approx(math.log(8.0))


def test_the_context_needs_no_draft() -> None:
    inputs = make_inputs()
    whole = layer_features(inputs, log_probs(5, 64))
    assert torch.equal(whole[: len(CONTEXT_NAMES)], context_features(inputs))
    assert torch.equal(whole, layer_features(inputs, log_probs(5, 64), context_features(inputs)))


def test_unnormalised_scores_mean_the_same_distribution() -> None:
    """A temperature leaves processed scores unnormalised; entropies and masses are of what they stand for."""
    inputs, log_q = make_inputs(parents=1, num_beams=1), log_probs(1, 64)
    shifted = named(layer_features(inputs, log_q + 2.5))
    for name, value in named(layer_features(inputs, log_q)).items():
        assert shifted[name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize(("parents", "vocab"), [(1, 1), (1, 0), (4, 3), (6, 40), (16, 100)])
@pytest.mark.parametrize("num_beams", [1, 2, 8, 40])
def test_always_finite(parents: int, vocab: int, num_beams: int) -> None:
    inputs, log_q = make_inputs(parents, num_beams), log_probs(parents, vocab)
    assert layer_features(inputs, log_q).isfinite().all()
    log_q[0] = float("-inf")  # a parent for which nothing is proposed
    features = layer_features(inputs, log_q)
    assert features.shape == (len(FEATURE_NAMES),)
    assert features.isfinite().all()


def test_the_host_never_waits() -> None:
    """Reading any value (item, bool, int) of a fake tensor raises."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = make_inputs()
        tensors = {name: mode.from_tensor(getattr(real, name)) for name in ("parent_scores_P", "root_scores_L")}
        features = layer_features(make_inputs(**tensors), mode.from_tensor(log_probs(5, 64)))
    assert features.shape == (len(FEATURE_NAMES),)


@pytest.mark.parametrize("redrawn", [0, 1, 2])
def test_redrawing_a_layer_changes_none_of_its_features(
    redrawn: int, tiny_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other noise from one layer on: other candidates there, and bitwise the same features up to and including it."""
    target, draft = tiny_llama(0), tiny_llama(1)
    real_gumbel = drafting.gumbel_where

    def first_block(salt: float) -> BlockRecord:
        calls = 0

        def noisy(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            noise = real_gumbel(*arguments)
            return noise.roll(int(salt), dims=1) if calls > redrawn else noise

        monkeypatch.setattr(drafting, "gumbel_where", noisy)
        records: list[BlockRecord] = []
        features: list[torch.Tensor] = []

        def observe(record: BlockRecord) -> None:
            if not records:
                features.extend(layer.view.features for layer in record.layers)
            records.append(record)

        beams = SpeculativeBeams(draft, drafter="model", policy=FixedWidth(3, 6), seed=5, observer=observe)
        target.generate(
            torch.tensor([[3, 4, 5]]), custom_generate=beams, num_beams=3, do_sample=True, max_new_tokens=8, top_k=None
        )
        seen.append(features)
        return records[0]

    seen: list[list[torch.Tensor]] = []
    one, other = first_block(0.0), first_block(7.0)
    assert not torch.equal(one.layers[redrawn].candidates.tokens_K, other.layers[redrawn].candidates.tokens_K)
    for layer in range(redrawn + 1):
        assert torch.equal(seen[0][layer], seen[1][layer])
