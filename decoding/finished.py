"""Finished hypotheses, and the rule that ends a search (transformers' ``_beam_search``, steps f and g)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
import torch

from .beams import Beams, Selection


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam: its tokens (T,) with the prompt, and its score after the length penalty."""

    sequence_T: torch.Tensor
    score: float


@dataclass
class FinishedBeams:
    """The best finished hypotheses of one prompt and the rule that ends the search (transformers' steps f and g).

    Attributes:
        num_beams: hypotheses kept.
        length_penalty: exponent of the generated length that divides a score.
        early_stopping: True, False or ``"never"``, as in transformers.
        max_new_tokens: longest continuation possible; used by ``"never"``.
        hypotheses: the best so far, best first.
        done: the search of this prompt has ended.
    """

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    max_new_tokens: int
    hypotheses: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def update(self, beams: Beams, selection: Selection, generated: int) -> None:
        """Take in one selection.

        Args:
            beams: the beams that were extended.
            selection: what the beam step chose.
            generated: tokens generated per beam, this layer's included.
        """
        finished = selection.finished
        if len(finished) and not (self.early_stopping is True and self._full):
            sequences = torch.cat([beams.sequences_LT[finished.parents_K], finished.tokens_K.unsqueeze(1)], dim=1)
            for sequence, index in zip(sequences, selection.finished_index, strict=True):
                score = _divide(selection.scores[index], generated**self.length_penalty)
                self.hypotheses.append(Hypothesis(sequence, score))
            self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: earlier ones win ties
            del self.hypotheses[self.num_beams :]
        self.done = selection.exhausted or not self._can_improve(selection.scores[selection.live_index[0]], generated)

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) >= self.num_beams

    def _can_improve(self, best: float, generated: int) -> bool:
        if not self._full:
            return True
        if self.early_stopping is True:
            return False
        never = self.early_stopping == "never" and self.length_penalty > 0.0
        length = self.max_new_tokens if never else generated
        return _divide(best, length**self.length_penalty) > self.hypotheses[-1].score


def _divide(score: float, divisor: float) -> float:
    """In float32, as transformers has it."""
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(score) / numpy.float32(divisor))
