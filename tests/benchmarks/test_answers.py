"""Answer scores."""

from __future__ import annotations

import pytest
import torch

from beamwise.benchmarks.answers import (
    answer_scores,
    exact_match,
    f1,
    final_number,
    mean_log_likelihood,
    mean_log_likelihoods,
    number_correct,
)
from tests.conftest import make_tiny_llama


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", 7.0),
        ("it costs $1,234.50", 1234.5),
        ("-2 degrees", -2.0),
        ("no idea", None),
        ("#### 18", 18.0),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_number_correct() -> None:
    assert number_correct("first 3, then **18** dollars", "18")
    assert not number_correct("18, no, 19", "18")
    assert not number_correct("none", "18")


def test_squad_scores() -> None:
    assert exact_match("The Eiffel-Tower!", "eiffeltower")
    assert not exact_match("a tower in Paris", "Paris")
    assert f1("a tower in Paris", "Paris") == pytest.approx(2 / 4)
    assert f1("", "Paris") == 0.0
    assert f1("The", "a") == 1.0


def test_mean_log_likelihood_is_the_models() -> None:
    model = make_tiny_llama(0, vocab_size=12)
    tokens = [2, 5, 7, 3, 9]
    log_probs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].detach().float(), dim=-1)
    expected = sum(float(log_probs[position - 1, tokens[position]]) for position in (2, 3, 4)) / 3
    assert mean_log_likelihood(model, tokens[:2], tokens[2:]) == pytest.approx(expected, abs=1e-6)


def test_batched_likelihoods_equal_single_ones() -> None:
    model = make_tiny_llama(0, vocab_size=12)
    texts = [([2, 5, 7], [3, 9]), ([4], [8, 8, 2, 6]), ([3, 3, 3, 3, 3, 3], [7]), ([9, 2], [4, 4])]
    singles = [mean_log_likelihood(model, prompt, new) for prompt, new in texts]
    assert mean_log_likelihoods(model, texts, batch_size=3) == pytest.approx(singles, abs=1e-6)
    assert mean_log_likelihoods(model, []) == []


def test_answers_are_scored_by_their_kind() -> None:
    assert answer_scores("so 18", {"answer": "18", "category": "gsm8k"}) == {"number_correct": True}
    assert answer_scores("The cat", {"answer": "cat", "category": "qa"}) == {"exact_match": True, "f1": 1.0}
    assert answer_scores("1901", {"answer": "1901", "category": "qa"}) == {"exact_match": True, "f1": 1.0}
    assert answer_scores("anything", {"category": "gsm8k"}) == {}
