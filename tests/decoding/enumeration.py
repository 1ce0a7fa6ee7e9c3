"""Exact laws of beam sampling on tiny models, by enumeration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tokens = tuple[int, ...]
Scored = tuple[float, Tokens]
LogProbs = Callable[[Tokens], list[float]]


def subset_law(probs: Sequence[float], size: int) -> dict[frozenset[int], float]:
    """Law of the set of ``size`` draws without replacement, each in proportion to what is left."""
    total = sum(probs)
    layer: dict[frozenset[int], float] = {frozenset(): 1.0}
    for _ in range(size):
        after: dict[frozenset[int], float] = defaultdict(float)
        for drawn, chance in layer.items():
            left = total - sum(probs[index] for index in drawn)
            for index, prob in enumerate(probs):
                if prob > 0.0 and index not in drawn:
                    after[drawn | {index}] += chance * prob / left
        layer = dict(after)
    return layer


def transformers_beam_law(log_probs: LogProbs, num_beams: int, max_new: int, eos: int) -> dict[Tokens, float]:
    """Law of the best sequence of ``generate(num_beams, do_sample=True)``, length_penalty 1, no early stopping.

    Args:
        log_probs: processed log-probabilities of the next token after some generated tokens.
        num_beams: W, at least 2.
        max_new: tokens generated at most.
        eos: the end token.
    """
    law: dict[Tokens, float] = defaultdict(float)

    def search(
        live: list[tuple[float, Tokens]], finished: list[tuple[float, Tokens]], length: int, weight: float
    ) -> None:
        candidates = []
        for score, tokens in live:
            for token, log_prob in enumerate(log_probs(tokens)):
                if log_prob > float("-inf"):
                    candidates.append((score + log_prob, (*tokens, token)))
        probs = torch.softmax(torch.tensor([score for score, _ in candidates], dtype=torch.float64), 0).tolist()
        for drawn, chance in subset_law(probs, min(2 * num_beams, len(candidates))).items():
            order = sorted((candidates[index] for index in drawn), key=lambda item: -item[0])
            ended = [item[1][-1] == eos or length == max_new for item in order]
            new = finished + [
                (item[0] / length, item[1])
                for item, end in zip(order[:num_beams], ended[:num_beams], strict=True)
                if end
            ]
            new = sorted(new, key=lambda item: -item[0])[:num_beams]
            going = [item for item, end in zip(order, ended, strict=True) if not end][:num_beams]
            done = not going or (len(new) == num_beams and going[0][0] / length <= new[-1][0])
            if done:
                law[new[0][1]] += weight * chance
            else:
                search(going, new, length + 1, weight * chance)

    search([(0.0, ())], [], 1, 1.0)
    return dict(law)


def chi_square_p_value(observed: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """p-value of counts against a law; outcomes expected fewer than five times are pooled.

    Any outcome outside the law's support gives 0.
    """
    from scipy.stats import chisquare

    if any(outcome not in law for outcome in observed):
        return 0.0
    total = sum(observed.values())
    pooled_seen, pooled_expected, seen, expected = 0.0, 0.0, [], []
    for outcome, chance in law.items():
        if chance * total < 5.0:
            pooled_seen += observed.get(outcome, 0)
            pooled_expected += chance * total
        else:
            seen.append(float(observed.get(outcome, 0)))
            expected.append(chance * total)
    if pooled_expected > 0.0:
        seen.append(pooled_seen)
        expected.append(pooled_expected)
    scale = total / sum(expected)
    return float(chisquare(seen, [value * scale for value in expected]).pvalue)


def slots_law(probs: Sequence[float], width: int, distinct: bool) -> dict[tuple[int, ...], float]:
    """Law of ``width`` draws, as sorted tuples: without replacement (at most the support), or independent."""
    if distinct:
        support = sum(prob > 0.0 for prob in probs)
        return {tuple(sorted(drawn)): chance for drawn, chance in subset_law(probs, min(width, support)).items()}
    total = sum(probs)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(width):
        after: dict[tuple[int, ...], float] = defaultdict(float)
        for drawn, chance in law.items():
            for index, prob in enumerate(probs):
                if prob > 0.0:
                    after[tuple(sorted((*drawn, index)))] += chance * prob / total
        law = dict(after)
    return law


def slot_beam_law(
    log_probs: LogProbs,
    widths: Sequence[int],
    num_beams: int,
    eos: int,
    distinct: bool = True,
    joint_top_k: int = 0,
) -> dict[tuple[Tokens, ...], float]:
    """Law of all sequences returned by rejection verification, best first (docs/exactness.md).

    Args:
        log_probs: processed log-probabilities of the next token after some generated tokens.
        widths: slots drawn at each layer; the last layer is the longest continuation's last token.
        num_beams: W, sequences returned; missing ones are ().
        eos: the end token.
        distinct: slots are draws without replacement.
        joint_top_k: keep the best k of the joint (0: all).
    """
    law: dict[tuple[Tokens, ...], float] = defaultdict(float)

    def search(live: tuple[Scored, ...], finished: tuple[Scored, ...], weight: float) -> None:
        length = len(live[0][1]) + 1
        candidates = [
            (score + log_prob, (*tokens, token))
            for score, tokens in live
            for token, log_prob in enumerate(log_probs(tokens))
            if log_prob > float("-inf")
        ]
        scores = torch.tensor([score for score, _ in candidates], dtype=torch.float64)
        if joint_top_k:
            floor = scores.topk(min(joint_top_k, len(candidates))).values[-1]
            scores = scores.masked_fill(scores < floor, float("-inf"))
        probs = torch.softmax(scores, 0).tolist()
        for drawn, chance in slots_law(probs, widths[length - 1], distinct).items():
            order = sorted((candidates[index] for index in drawn), key=lambda item: -item[0])
            going = tuple(item for item in order if item[1][-1] != eos and length < len(widths))
            ended = [(item[0] / length, item[1]) for item in order if item not in going]
            new = tuple(sorted([*finished, *ended], key=lambda item: -item[0])[:num_beams])
            if not going or (len(new) == num_beams and going[0][0] / length <= new[-1][0]):
                returned = tuple(tokens for _, tokens in new)
                law[returned + ((),) * (num_beams - len(returned))] += weight * chance
            else:
                search(going, new, weight * chance)

    search(((0.0, ()),), (), 1.0)
    return dict(law)
