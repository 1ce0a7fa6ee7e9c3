"""Whether asking the networks is worth its time in the prompt at hand, or the plan that is best on average will do.

An ask takes a few per cent of a block. Where the answers hardly differ, or differ in nothing that matters, the same
plan without an ask is faster. The asks so far tell what asking has gained, and what each plan would have gained had it
been taken every time. Where one of these is better, the plan that is best by the mean of the answers is taken, as far
as outcomes still speak for it, and asking is tried again ever more rarely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MEMORY = 0.8
"""Share of the sums that the next ask keeps: about 5 asks count."""

_LONGEST_REST = 8
"""Most blocks in a row that pass without asking."""


@dataclass
class Habit:
    """The asks about one layer of a prompt's blocks. Values are layers gained, net of the time that they take.

    Attributes:
        origin: of all prompts, which learns from this one's asks, too.
        asked: asks, a decayed sum, as those below.
        gained: by what the networks answered, the price of asking paid.
        values_WJ: that each plan (width, draft width) would have gained without asking.
        probs_WJ: success probabilities of the plans, as the networks gave them.
        rest: blocks that will still pass without asking.
        idle: asks in a row that were not worth it.
    """

    origin: Habit | None = None
    asked: float = 0.0
    gained: float = 0.0
    values_WJ: np.ndarray | float = 0.0
    probs_WJ: np.ndarray | float = 0.0
    rest: int = 0
    idle: int = 0

    @classmethod
    def new(cls, origin: Habit) -> Habit:
        """Of a prompt that begins: the other prompts count as one ask, if there were any."""
        share = 1.0 / max(origin.asked, 1.0)
        values_WJ, probs_WJ = share * np.asarray(origin.values_WJ), share * np.asarray(origin.probs_WJ)
        return cls(origin, share * origin.asked, share * origin.gained, values_WJ, probs_WJ)

    def rests(self) -> bool:
        """Whether this block passes without asking; it counts as passed."""
        resting = self.rest > 0
        self.rest -= resting
        return resting

    @property
    def mean_probs(self) -> np.ndarray:
        """Mean of the success probabilities of the plans, float (W, J); there was an ask."""
        return np.asarray(self.probs_WJ) / self.asked

    def learn(self, gained: float, values_WJ: np.ndarray, probs_WJ: np.ndarray) -> None:
        """Take in an ask.

        Args:
            gained: by the answer.
            values_WJ: float (W, J), what each plan would have gained.
            probs_WJ: float (W, J), success probabilities of the plans.
        """
        self.asked = _MEMORY * self.asked + 1.0
        self.gained = _MEMORY * self.gained + gained
        self.values_WJ = _MEMORY * self.values_WJ + values_WJ
        self.probs_WJ = _MEMORY * self.probs_WJ + probs_WJ
        self.idle = 0 if self.gained > max(float(self.values_WJ.max()), 0.0) else self.idle + 1
        alone = self.asked <= 1.0  # one ask, of any prompt, says too little
        self.rest = 0 if alone else min(2**self.idle // 2, _LONGEST_REST)
        if self.origin is not None:
            self.origin.learn(gained, values_WJ, probs_WJ)


class Habits:
    """Those of the layers of one prompt's blocks.

    Args:
        origin: of all prompts; None for those themselves.
    """

    def __init__(self, origin: Habits | None = None) -> None:
        self._origin = origin
        self._layers: list[Habit] = []

    def at(self, layer: int) -> Habit:
        """The habit of a layer."""
        while len(self._layers) <= layer:
            origin = self._origin
            self._layers.append(Habit() if origin is None else Habit.new(origin.at(len(self._layers))))
        return self._layers[layer]
