"""How logits become the log-probabilities that beams are scored with, and when a continuation stops.

Both are transformers' own objects: a ``LogitsProcessorList`` and a ``StoppingCriteriaList``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .config import DecodeConfig

_VOCABULARY_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Warpers that look at scores alone, so that they mean the same on a reduced draft vocabulary, or on a joint."""


def make_rules(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    eos_ids: torch.Tensor,
    config: DecodeConfig,
    vocab_size: int,
) -> SearchRules:
    """The rules of a search. With ``warping="joint"`` the warpers that look at scores alone act on the joint.

    Args:
        processors: transformers' logits processors, warpers included.
        criteria: transformers' stopping criteria.
        eos_ids: int64 (n_eos,).
        config: of the search.
        vocab_size: of the target.
    """
    joint = LogitsProcessorList()
    if config.warping == "joint":
        joint = LogitsProcessorList([p for p in processors if isinstance(p, _VOCABULARY_FREE)])
        processors = LogitsProcessorList([p for p in processors if not isinstance(p, _VOCABULARY_FREE)])
    return SearchRules(processors, criteria, eos_ids, config.num_beams == 1, vocab_size, joint)


@dataclass(frozen=True)
class SearchRules:
    """Scoring and stopping of one call.

    Attributes:
        processors: transformers' logits processors, warpers included.
        criteria: transformers' stopping criteria, EOS and length included.
        eos_ids: int64 (n_eos,), the EOS tokens; drafters never propose them, since they are never extended.
        single: one beam was asked for: transformers then processes logits, not log-probabilities.
        vocab_size: of the target.
        joint_warpers: act on the distribution over (beam, token), to draw by; scores are kept without them. Empty
            except in rejection verification with ``warping="joint"``.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    eos_ids: torch.Tensor
    single: bool
    vocab_size: int
    joint_warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)

    @property
    def n_eos(self) -> int:
        """Number of EOS tokens."""
        return int(self.eos_ids.shape[0])

    @cached_property
    def stateless(self) -> bool:
        """Whether all processors and criteria are transformers' own: they may see beams that never come to be."""
        return all(type(part).__module__.startswith("transformers.") for part in (*self.processors, *self.criteria))

    @cached_property
    def draft(self) -> DraftRules:
        """The same scoring for a drafter. Processors are copied: a stateful one must not see speculative beams."""
        return DraftRules(copy.deepcopy(self.processors), self.single, self.vocab_size, self.joint_warpers)

    def log_probs(self, sequences_LT: torch.Tensor, logits_LV: torch.Tensor) -> torch.Tensor:
        """Processed log-probabilities, float32 (L, V), of beams with tokens (L, T) and logits (L, V)."""
        return _process(self.processors, self.single, sequences_LT, logits_LV.float())

    def log_weights(self, scores_L: torch.Tensor, log_probs_LV: torch.Tensor) -> torch.Tensor:
        """Unnormalised log-probabilities of the joint distribution over (beam, token), float32 (L, V)."""
        return _warp_joint(self.joint_warpers, scores_L, log_probs_LV)

    def stops(self, sequences_LT: torch.Tensor, parents_K: torch.Tensor, tokens_K: torch.Tensor) -> torch.Tensor:
        """Whether continuations end: bool (K,), for parents (K,) among beams with tokens (L, T) and new tokens (K,)."""
        extended = torch.cat([sequences_LT[parents_K], tokens_K.unsqueeze(1)], dim=1)
        # transformers' type hints say FloatTensor scores; every criterion accepts None, as _beam_search passes it too
        return cast(torch.Tensor, self.criteria(extended, cast(torch.FloatTensor, None))).bool()


@dataclass(frozen=True)
class DraftRules:
    """Scoring of a drafter's proposals; see `SearchRules`."""

    processors: LogitsProcessorList
    single: bool
    vocab_size: int
    joint_warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)

    def log_weights(self, scores_L: torch.Tensor, log_probs_LV: torch.Tensor) -> torch.Tensor:
        """As `SearchRules.log_weights`, over the drafter's columns."""
        return _warp_joint(self.joint_warpers, scores_L, log_probs_LV)

    def log_probs(
        self, sequences_LT: torch.Tensor, logits_LV: torch.Tensor, token_ids_V: torch.Tensor | None
    ) -> torch.Tensor:
        """Processed log-probabilities, float32 (L, Vd), over the drafter's columns."""
        if token_ids_V is None or all(isinstance(processor, _VOCABULARY_FREE) for processor in self.processors):
            return _process(self.processors, self.single, sequences_LT, logits_LV)
        full = logits_LV.new_full((logits_LV.shape[0], self.vocab_size), float("-inf"))
        full[:, token_ids_V] = logits_LV
        return _process(self.processors, self.single, sequences_LT, full)[:, token_ids_V]


def _process(
    processors: LogitsProcessorList, single: bool, sequences_LT: torch.Tensor, logits_LV: torch.Tensor
) -> torch.Tensor:
    if single:
        return torch.log_softmax(processors(sequences_LT, logits_LV), dim=-1)  # type: ignore[arg-type]
    return processors(sequences_LT, torch.log_softmax(logits_LV, dim=-1))  # type: ignore[arg-type]


def _warp_joint(warpers: LogitsProcessorList, scores_L: torch.Tensor, log_probs_LV: torch.Tensor) -> torch.Tensor:
    accumulated = log_probs_LV + scores_L.unsqueeze(1)
    if not warpers:
        return accumulated
    flat = accumulated.reshape(1, -1)
    no_tokens = torch.empty(1, 0, dtype=torch.int64, device=flat.device)
    return warpers(no_tokens, flat).view_as(accumulated)  # type: ignore[arg-type]
