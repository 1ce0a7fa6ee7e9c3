"""Scores of answers: GSM8K's final number, SQuAD's exact match and F1, and the target's own opinion of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def final_number(text: str) -> float | None:
    """The last number of a text, GSM8K's convention; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def number_correct(text: str, answer: str) -> bool:
    """Whether a text ends with the right number."""
    wanted, found = final_number(answer), final_number(text)
    return wanted is not None and found is not None and abs(found - wanted) < 1e-6


def normalise_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces (Rajpurkar et al. 2016)."""
    lowered = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def exact_match(text: str, answer: str) -> bool:
    """SQuAD's exact match."""
    return normalise_answer(text) == normalise_answer(answer)


def f1(text: str, answer: str) -> float:
    """SQuAD's F1 of the words of a text and an answer."""
    words, wanted = normalise_answer(text).split(), normalise_answer(answer).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    if not words or not wanted:
        return float(words == wanted)
    return 2.0 * shared / (len(words) + len(wanted))


@torch.inference_mode()
def mean_log_likelihood(model: PreTrainedModel, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> float:
    """Mean log-probability per new token under a model, without any warping, in nats.

    Args:
        model: scores the text; float32 is advised.
        prompt_ids: tokens before.
        new_ids: at least one.
    """
    tokens = torch.tensor([[*prompt_ids, *new_ids]], device=model.device)
    logits = model(tokens[:, :-1]).logits[0, len(prompt_ids) - 1 :].float()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, len(prompt_ids) :].unsqueeze(1))
    return float(chosen.mean())


def answer_scores(text: str, record: Mapping[str, Any]) -> dict[str, bool | float]:
    """The scores of a text whose prompt carries an answer; empty where it carries none.

    Args:
        text: what was decoded.
        record: the prompt's line, with ``answer`` and ``category``; in GSM8K's the final number counts.

    Returns:
        ``number_correct``, or ``exact_match`` and ``f1``.
    """
    answer = record.get("answer")
    if answer is None:
        return {}
    if "gsm8k" in str(record.get("category")) and final_number(str(answer)) is not None:
        return {"number_correct": number_correct(text, str(answer))}
    return {"exact_match": exact_match(text, str(answer)), "f1": f1(text, str(answer))}


@torch.inference_mode()
def mean_log_likelihoods(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int = 8
) -> list[float]:
    """`mean_log_likelihood` of many texts, in batches of similar length, padded on the right.

    Args:
        model: scores the texts; float32 is advised.
        texts: (prompt ids, new ids), at least one of each.
        batch_size: texts in one forward.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index][0]) + len(texts[index][1]))
    scores = [0.0] * len(texts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows = [torch.tensor([*texts[index][0], *texts[index][1]]) for index in chosen]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        # causal attention: what is padded on the right cannot be seen from the left
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        keep = tokens.shape[1] - min(len(texts[index][0]) for index in chosen) + 1
        logits = model(tokens, attention_mask=mask.to(model.device), logits_to_keep=keep).logits.float()
        first = tokens.shape[1] - logits.shape[1]
        for row, index in enumerate(chosen):
            prompt, new = len(texts[index][0]), len(texts[index][1])
            log_probs = torch.log_softmax(logits[row, prompt - 1 - first : prompt + new - 1 - first], dim=-1)
            picked = log_probs.gather(1, tokens[row, prompt : prompt + new].unsqueeze(1))
            scores[index] = float(picked.mean())
    return scores
