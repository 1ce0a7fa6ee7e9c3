"""What decoding yields per millisecond: the rate that a further layer must beat."""

from __future__ import annotations

from dataclasses import dataclass, field

from .habit import Habits

_MEMORY = 0.98
"""Share of the running sums that the next block keeps: the rate looks back about 50 blocks."""


@dataclass
class Ledger:
    """Running averages of decoding with one number of beams.

    Attributes:
        layers: expected layers of past blocks, decayed.
        ms: their expected milliseconds, decayed.
        habits: of all prompts.
    """

    layers: float = 0.0
    ms: float = 0.0
    habits: Habits = field(default_factory=Habits)

    def begin(self, ms: float) -> None:
        """A block starts: the target's forward alone gives one layer for ``ms``."""
        self.layers = _MEMORY * self.layers + 1.0
        self.ms = _MEMORY * self.ms + ms

    def add(self, layers: float, ms: float) -> None:
        """The block's plan grew."""
        self.layers += layers
        self.ms += ms

    @property
    def rate(self) -> float:
        """Layers per millisecond."""
        return self.layers / self.ms
