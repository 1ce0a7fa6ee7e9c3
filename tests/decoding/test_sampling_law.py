"""The law of sampled beams, and of the noise behind it.

Seeds are fixed, so nothing here flickers; a correct program fails each test below with the stated probability over the
choice of its seed.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from transformers import LlamaForCausalLM

from beamwise.decoding.beams import top_candidates
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.noise import extend_path, gumbel, gumbel_where, root_path
from tests.conftest import make_tiny_llama
from tests.decoding.enumeration import chi_square_p_value, subset_law, transformers_beam_law

FALSE_ALARM = 1e-3
"""Per test."""
EOS, DRAWS = 1, 1500
PROMPT = (2, 3)


@functools.cache
def model(seed: int, vocab: int) -> LlamaForCausalLM:
    return make_tiny_llama(seed, vocab_size=vocab, layers=2, scale=0.35)


def next_log_probs(temperature: float, top_k: int, vocab: int) -> Any:
    @functools.cache
    def log_probs(tokens: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logits = model(0, vocab)(torch.tensor([PROMPT + tokens])).logits[0, -1].float()
        scores = torch.log_softmax(logits, 0) / temperature
        if top_k:
            floor = torch.topk(scores, max(top_k, 2)).values[-1]
            scores = scores.masked_fill(scores < floor, float("-inf"))
        return scores.tolist()

    return log_probs


@pytest.mark.parametrize(
    ("num_beams", "vocab", "max_new", "temperature", "top_k"),
    [(2, 5, 3, 1.0, 0), (2, 6, 3, 0.7, 4), (3, 6, 2, 1.0, 0), (3, 6, 2, 1.3, 0)],
)
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_whole_sequences_follow_transformers_law(
    num_beams: int, vocab: int, max_new: int, temperature: float, top_k: int, drafter: Any
) -> None:
    law = transformers_beam_law(next_log_probs(temperature, top_k, vocab), num_beams, max_new, EOS)
    assert abs(sum(law.values()) - 1.0) < 1e-9
    custom = SpeculativeBeams(
        draft_model=model(3, vocab), drafter=drafter, gamma=2, draft_width=num_beams + 1, seed=11, batch_size=100
    )
    prompts = torch.tensor([PROMPT] * DRAWS)
    rows = model(0, vocab).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        num_beams=num_beams,
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        max_new_tokens=max_new,
        eos_token_id=EOS,
        pad_token_id=EOS,
        custom_generate=custom,
    )
    seen = Counter(_until_eos(row[len(PROMPT) :].tolist()) for row in rows)
    assert chi_square_p_value(dict(seen), law) > FALSE_ALARM


def _until_eos(tokens: list[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def test_one_beam_samples_from_the_model() -> None:
    """W = 1 is plain sampling, as in transformers, with speculation too."""
    vocab = 6
    log_probs = next_log_probs(1.0, 0, vocab)
    law: dict[tuple[int, ...], float] = {}
    for first, log_first in enumerate(log_probs(())):
        if first == EOS:
            law[(first,)] = float(torch.tensor(log_first).exp())
            continue
        for second, log_second in enumerate(log_probs((first,))):
            law[(first, second)] = float(torch.tensor(log_first + log_second).exp())
    custom = SpeculativeBeams(
        draft_model=model(3, vocab), drafter="model", gamma=1, draft_width=2, seed=5, batch_size=100
    )
    prompts = torch.tensor([PROMPT] * DRAWS)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "eos_token_id": EOS}
    options |= {"pad_token_id": EOS, "attention_mask": torch.ones_like(prompts)}
    rows = model(0, vocab).generate(prompts, custom_generate=custom, **options)
    seen = Counter(_until_eos(row[len(PROMPT) :].tolist()) for row in rows)
    assert chi_square_p_value(dict(seen), law) > FALSE_ALARM


def test_the_wrong_law_is_noticed() -> None:
    """The test's power: draws at one temperature are rejected against the law of another."""
    vocab = 5
    law = transformers_beam_law(next_log_probs(1.0, 0, vocab), 2, 3, EOS)
    prompts = torch.tensor([PROMPT] * DRAWS)
    options: dict[str, Any] = {"num_beams": 2, "do_sample": True, "top_k": 0, "max_new_tokens": 3}
    options |= {"eos_token_id": EOS, "pad_token_id": EOS, "attention_mask": torch.ones_like(prompts)}
    custom = SpeculativeBeams(drafter="none", seed=11, batch_size=100)
    rows = model(0, vocab).generate(prompts, temperature=1.15, custom_generate=custom, **options)
    seen = Counter(_until_eos(row[len(PROMPT) :].tolist()) for row in rows)
    assert chi_square_p_value(dict(seen), law) < FALSE_ALARM


def test_candidates_are_draws_without_replacement() -> None:
    """Sets of three candidates over (2 beams x 4 tokens), against the exact law; false alarm 1e-3."""
    scores = torch.tensor([-0.3, -1.1])
    log_probs = torch.log_softmax(torch.tensor([[0.1, 1.0, -0.5, 0.3], [0.7, 0.0, 0.4, -1.0]]), dim=1)
    probs = torch.softmax((log_probs + scores[:, None]).view(-1).double(), 0).tolist()
    law = {tuple(sorted(drawn)): chance for drawn, chance in subset_law(probs, 3).items()}
    counts: Counter[tuple[int, ...]] = Counter()
    for draw in range(6000):
        paths = extend_path(root_path(draw, 0).repeat(2), torch.arange(2))
        drawn = top_candidates(scores, log_probs, gumbel(paths, torch.arange(4)), 3)
        counts[tuple(sorted((drawn.parents_K * 4 + drawn.tokens_K).tolist()))] += 1
    assert chi_square_p_value(dict(counts), law) > FALSE_ALARM


def test_noise_is_gumbel_and_independent() -> None:
    """Kolmogorov-Smirnov along tokens, beams and seeds, and correlations; false alarm 1e-3 each."""
    tokens = torch.arange(49152)
    roots = torch.cat([root_path(seed, 0) for seed in range(20)])
    along_tokens = gumbel(roots[:4], tokens)
    children = extend_path(roots[:1].repeat(5000), torch.arange(5000))
    along_beams = gumbel(children, torch.tensor([17]))[:, 0]
    along_seeds = torch.cat([gumbel(root_path(seed, 0), torch.tensor([17]))[0] for seed in range(3000)])
    along_streams = torch.cat([gumbel(root_path(0, stream), torch.tensor([17]))[0] for stream in range(3000)])
    for sample in (*along_tokens, along_beams, along_seeds, along_streams):
        assert torch.isfinite(sample).all()
        assert kstest(sample.double().numpy(), "gumbel_r").pvalue > FALSE_ALARM
    uniform = torch.exp(-torch.exp(-along_tokens.double())) - 0.5
    pairs = [(uniform[0], uniform[1]), (uniform[0, :-1], uniform[0, 1:]), (uniform[2, :-256], uniform[2, 256:])]
    for left, right in pairs:
        correlation = (left * right).mean() * 12
        assert abs(float(correlation)) < 3.3 / left.shape[0] ** 0.5


def test_noise_does_not_depend_on_the_order_of_evaluation() -> None:
    paths = extend_path(root_path(3, 1).repeat(4), torch.tensor([5, 6, 7, 8]))
    tokens = torch.arange(100)
    whole = gumbel(paths, tokens)
    assert torch.equal(whole[2:3, 40:60], gumbel(paths[2:3], tokens[40:60]))
    assert torch.equal(whole[[3, 1]], gumbel(paths[[3, 1]], tokens))
    assert torch.equal(whole[:, 10], gumbel(paths, torch.full((4, 1), 10))[:, 0])


@pytest.mark.parametrize("excluded", [0.0, 0.5, 0.99, 1.0])
def test_noise_of_what_can_be_drawn_is_the_same_noise(excluded: float) -> None:
    torch.manual_seed(0)
    paths, tokens = torch.cat([root_path(seed, 0) for seed in range(3)]), torch.randperm(500)
    weights = torch.randn(3, 500).masked_fill_(torch.rand(3, 500) < excluded, float("-inf"))
    weights[1, 7] = float("nan")
    expected = weights + gumbel(paths, tokens)
    found = weights + gumbel_where(paths, tokens, weights)
    assert torch.equal(found.nan_to_num(99.0), expected.nan_to_num(99.0))
