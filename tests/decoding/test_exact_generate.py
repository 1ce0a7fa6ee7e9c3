"""Greedy output equals transformers' own, configuration by configuration; drafts can only change the speed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import FixedWidth, RandomWidth
from tests.conftest import make_tiny_llama

VOCAB = 40


@functools.cache
def target(seed: int) -> LlamaForCausalLM:
    return make_tiny_llama(seed, vocab_size=VOCAB, layers=3)


@functools.cache
def draft(seed: int, kind: str) -> Any:
    if kind == "itself":
        return target(seed)
    if kind == "hopeless":
        return make_tiny_llama(seed + 100, vocab_size=VOCAB, layers=1)
    return build_draft(target(seed), kind, [0, 2], torch.arange(1, VOCAB, 2))


class StopsOnPair(StoppingCriteria):
    """Ends a sequence whose last two tokens sum to a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] + input_ids[:, -2]) % 7 == 0


class EvenLater(torch.nn.Module):
    """A processor that looks at the sequence: odd tokens cost more once the length is even."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalty = 0.5 * (torch.arange(scores.shape[1]) % 2) * (input_ids.shape[1] % 2 == 0)
        return scores - penalty


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of generate."""
    num_beams = draw(st.integers(1, 8))
    eos = draw(st.sampled_from([None, 1, [1, 5], [1, 5, 9]]))
    keep = max(2, 1 + (len(eos) if isinstance(eos, list) else 1)) * num_beams
    options: dict[str, Any] = {
        "num_beams": num_beams if keep <= VOCAB else 4,
        "max_new_tokens": draw(st.integers(1, 14)),
        "eos_token_id": eos,
        "pad_token_id": draw(st.sampled_from([0, 3])),
    }
    if options["num_beams"] > 1:
        options["length_penalty"] = draw(st.sampled_from([0.0, 0.7, 1.0, 2.0, -0.5]))
        options["early_stopping"] = draw(st.sampled_from([False, True, "never"]))
        options["num_return_sequences"] = draw(st.integers(1, options["num_beams"]))
    if draw(st.booleans()):
        options["repetition_penalty"] = draw(st.sampled_from([1.2, 2.0]))
    if draw(st.booleans()):
        options["no_repeat_ngram_size"] = draw(st.integers(1, 3))
    if eos is not None and draw(st.booleans()):
        options["min_new_tokens"] = draw(st.integers(1, 6))
    if draw(st.booleans()):
        options["bad_words_ids"] = [[draw(st.integers(2, VOCAB - 1))], [7, 8]]
    return options


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    longest = max(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    ids = torch.randint(2, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


@settings(
    max_examples=320,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a counterexample is shown as drawn: shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(
    seed=st.integers(0, 3),
    kind=st.sampled_from(["itself", "hopeless", "pruned", "feature", "none"]),
    drafter=st.sampled_from(["model", "lookup", "union"]),
    gamma=st.integers(0, 4),
    draft_width=st.integers(1, 12),
    batch_size=st.integers(1, 3),
    extra=st.sampled_from(["", "stopping", "processor", "prefix"]),
    options=searches(),
    batch=inputs(),
)
def test_greedy_equals_transformers(
    seed: int,
    kind: str,
    drafter: Any,
    gamma: int,
    draft_width: int,
    batch_size: int,
    extra: str,
    options: dict[str, Any],
    batch: dict[str, torch.Tensor],
) -> None:
    if extra == "stopping" and options["num_beams"] == 1 and options["eos_token_id"] is None:
        # without EOS, transformers' sampling loop lets a stopped row run on until the last row stops
        batch = {name: rows[:1] for name, rows in batch.items()}

    def run(custom: SpeculativeBeams | None) -> Any:
        more: dict[str, Any] = {}
        if extra == "stopping":
            more["stopping_criteria"] = StoppingCriteriaList([StopsOnPair()])
        elif extra == "processor":
            more["logits_processor"] = LogitsProcessorList([EvenLater()])
        elif extra == "prefix":
            more["prefix_allowed_tokens_fn"] = lambda row, ids: list(range(row % 3, VOCAB))
        output = {"return_dict_in_generate": True, "output_scores": True}
        return target(seed).generate(**batch, **options, **more, **output, do_sample=False, custom_generate=custom)

    theirs = run(None)
    draft_model = None if kind == "none" else draft(seed, kind)
    named = "lookup" if kind == "none" else drafter
    ours = run(
        SpeculativeBeams(
            draft_model=draft_model, drafter=named, gamma=gamma, draft_width=draft_width, batch_size=batch_size
        )
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    if options["num_beams"] > 1:
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3, 6])
def test_nothing_but_the_seed_changes_the_output(num_beams: int, do_sample: bool) -> None:
    model = target(1)
    prompts = torch.randint(2, VOCAB, (4, 6), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"num_beams": num_beams, "do_sample": do_sample, "max_new_tokens": 24, "eos_token_id": 1}
    options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(prompts), "num_return_sequences": num_beams}
    options["num_return_sequences"] = num_beams if num_beams > 1 else 1

    def run(seed: int, **settings_: Any) -> list[list[int]]:
        custom = SpeculativeBeams(seed=seed, **settings_)
        return model.generate(prompts, custom_generate=custom, **options).tolist()

    reference = run(7, drafter="none")
    for kind in ("itself", "hopeless", "pruned", "feature"):
        for drafter in ("model", "union"):
            for policy in (FixedWidth(1, 1), FixedWidth(3, num_beams + 2), RandomWidth(4, (1, 2, 5, 9), seed=2)):
                for batch_size in (1, 3):
                    settings_ = {"drafter": drafter, "policy": policy, "batch_size": batch_size}
                    assert run(7, draft_model=draft(1, kind), **settings_) == reference, (kind, settings_)
    assert run(7, drafter="lookup", gamma=5, draft_width=3) == reference
    if do_sample:
        assert run(8, drafter="none") != reference


def test_a_good_draft_is_accepted_and_a_hopeless_one_costs_forwards() -> None:
    model = target(0)
    prompts = torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(0))
    lengths = {}
    for kind in ("itself", "hopeless"):
        custom = SpeculativeBeams(draft_model=draft(0, kind), drafter="model", gamma=4, draft_width=6)
        model.generate(prompts, num_beams=3, max_new_tokens=40, eos_token_id=None, custom_generate=custom)
        assert custom.stats.layers == 40
        lengths[kind] = custom.stats.mean_acceptance_length
    assert lengths["itself"] > 4.0  # five at most: children of beams that only the draft kept may crowd some out
    assert lengths["hopeless"] < 2.0


def test_torch_seed_steers_sampling() -> None:
    model = target(2)
    prompts = torch.tensor([[3, 4, 5]])
    options: dict[str, Any] = {"num_beams": 2, "do_sample": True, "max_new_tokens": 12, "eos_token_id": None}

    def run(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return model.generate(prompts, custom_generate=SpeculativeBeams(), **options)[0].tolist()

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(8)}) > 1


def test_equal_prompts_in_one_call_get_independent_noise() -> None:
    prompts = torch.tensor([[3, 4, 5]] * 6)
    options: dict[str, Any] = {"num_beams": 2, "do_sample": True, "max_new_tokens": 10, "eos_token_id": None}
    rows = target(2).generate(prompts, custom_generate=SpeculativeBeams(seed=1), **options)
    assert len({tuple(row) for row in rows.tolist()}) > 1
