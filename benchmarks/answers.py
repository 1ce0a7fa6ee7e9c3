"""Scores of answers: GSM8K's final number, SQuAD's exact match and F1, and the target's own opinion of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

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
