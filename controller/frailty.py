"""What a prompt is like, beyond what the features tell: a factor on the networks' hazards, its frailty.

Layers of one prompt share something that no feature shows: the draft knows its subject, or does not. In survival
analysis such a factor that the members of a group share is their frailty (Vaupel, Manton and Stallard 1979; Clayton
1978). Its logarithm is taken to be normal around 0; every outcome moves it by one Newton step, as in an extended Kalman
filter. So the first outcomes of a prompt move it far and later ones less, a surprise more than what was promised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MEMORY = 0.98
"""Share of the information that the next block keeps: about 50 blocks count."""

_SURE = 1e-3
"""Probabilities nearer to 0 or 1 are taken to be this far, so that no outcome moves the frailty without bound."""

_MOST = 3.0
"""Bound of the frailty's logarithm."""


@dataclass
class Frailty:
    """A prompt's factor on the hazards of one network.

    Attributes:
        spread: standard deviation of the logarithm between prompts.
        log: the logarithm's estimate.
        information: of the outcomes so far (Fisher's), decayed.
    """

    spread: float
    log: float = 0.0
    information: float = 0.0

    def applied(self, probs: np.ndarray) -> np.ndarray:
        """Success probabilities in this prompt, from those of prompts in general: 1 - (1 - p)^frailty."""
        adjusted: np.ndarray = -np.expm1(np.log1p(-np.minimum(probs, 1.0 - _SURE)) * math.exp(self.log))
        return adjusted

    def applied_to(self, prob: float) -> float:
        """The same of one probability, for which numpy would be slow."""
        return -math.expm1(math.log1p(-min(prob, 1.0 - _SURE)) * math.exp(self.log))

    def update(self, prob: float, outcome: float) -> None:
        """Learn from a layer.

        Args:
            prob: success probability that the network gave, frailty apart.
            outcome: 1 where the layer was covered, 0 where it was not; a probability where that is what is known.
        """
        expected = min(max(self.applied_to(prob), _SURE), 1.0 - _SURE)
        slope = -(1.0 - expected) * math.log1p(-expected)  # of the probability, by the logarithm of the frailty
        score = slope / (expected * (1.0 - expected))
        self.information += slope * score
        self.log += score * (outcome - expected) / (self.information + self.spread**-2)
        self.log = min(max(self.log, -_MOST), _MOST)


_PATIENCE = 4
"""Blocks without the draft until it is looked at; every look that finds nothing worth drafting doubles them."""


@dataclass
class PromptFrailty:
    """Those of both networks in one prompt.

    Where the draft never runs, nothing could tell that it has become worth it. So it is looked at though the prior sees
    no hope: in the first block, and after ever more blocks without it, as long as looks disappoint.

    Attributes:
        full: of the network that has seen the draft; verification finds its outcomes.
        prior: of the one that has not, beside the other: it learns from the other's probability, which is known as soon
            as the draft has run and is less noisy than an outcome.
        planned: probabilities that were given for the layers of the block at hand.
        waited: blocks since the last look, or since a layer was drafted.
        patience: blocks until the next look.
    """

    # in replays, spreads of 0.15 to 0.5 (full) and 0.5 to 1.5 (prior) were within half a per cent of each other
    full: Frailty = field(default_factory=lambda: Frailty(spread=0.5))
    prior: Frailty = field(default_factory=lambda: Frailty(spread=0.9))
    planned: list[float] = field(default_factory=list)
    waited: int = 0
    patience: int = 0

    def look(self) -> bool:
        """Whether it is time for a look; it counts as taken."""
        if self.waited < self.patience:
            return False
        self.waited, self.patience = 0, 2 * self.patience or _PATIENCE
        return True

    def begin(self, outcomes: Sequence[bool]) -> None:
        """A block begins; ``outcomes`` are those of the last one's layers, as far as they were reached."""
        for frailty in (self.full, self.prior):
            frailty.information *= _MEMORY
        self.waited += 1
        if self.planned:
            self.waited, self.patience = 0, _PATIENCE
        for prob, outcome in zip(self.planned, outcomes, strict=False):
            self.full.update(prob, float(outcome))
        self.planned = []
