"""How far the networks can be trusted in the prompt at hand.

A prompt may be unlike those that the networks learnt from; its own first layers tell. The probabilities that a network
gave are promises: where fewer are kept than were made, those that it gives next are lowered in proportion, and raised
where more are kept. The network that has seen the draft is judged by what verification found; the one that
decides whether to run the draft at all by the other's opinion, which is known as soon as the draft has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.98
"""Share of the sums that the next block keeps: about 50 blocks count."""


@dataclass
class Promises:
    """Promises made and kept, as decayed sums.

    Attributes:
        doubt: promises, and as many kept, that stand before any: the more, the less the first ones say.
        made: sum of the probabilities given.
        kept: sum of what came of them.
    """

    doubt: float
    made: float = 0.0
    kept: float = 0.0

    @property
    def factor(self) -> float:
        """What probabilities are multiplied by: 1 before any promise."""
        return (self.kept + self.doubt) / (self.made + self.doubt)

    def add(self, promise: float, kept: float) -> None:
        """A promise, and what came of it."""
        self.made += promise
        self.kept += kept

    def fade(self) -> None:
        """A block has passed."""
        self.made *= _MEMORY
        self.kept *= _MEMORY


@dataclass
class PromptTrust:
    """The promises of both networks in one prompt.

    Attributes:
        full: of the network that has seen the draft; an outcome is yes or no.
        prior: of the one that has not; it is judged by the other's probability, which is less noisy.
        planned: probabilities given for the layers of the block at hand.
    """

    full: Promises = field(default_factory=lambda: Promises(doubt=2.0))
    prior: Promises = field(default_factory=lambda: Promises(doubt=0.5))
    planned: list[float] = field(default_factory=list)

    def begin(self, outcomes: Sequence[bool]) -> None:
        """A block begins; ``outcomes`` are those of the last one's layers, as far as they were reached."""
        self.full.fade()
        self.prior.fade()
        for promise, outcome in zip(self.planned, outcomes, strict=False):
            self.full.add(promise, float(outcome))
        self.planned = []
