"""The state of one prompt while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .beams import Beams
from .config import DecodeConfig
from .finished import FinishedBeams, Hypothesis
from .forest import Forest
from .rules import SearchRules
from .stats import DecodeStats


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_T: int64 (T,), token ids, left padding included.
        num_padding: how many of the first tokens are padding.
        config: the search asked for.
        rules: scoring and stopping.
        stream: number of the prompt in its call; tells the noise of equal prompts apart.
    """

    prompt_T: torch.Tensor
    num_padding: int
    config: DecodeConfig
    rules: SearchRules
    stream: int = 0


@dataclass(frozen=True)
class Result:
    """Outcome of one request: its hypotheses, best first (at most ``num_beams``), and what they cost."""

    hypotheses: list[Hypothesis]
    stats: DecodeStats


@dataclass(frozen=True)
class History:
    """What a prompt's past blocks tell about its next one.

    Attributes:
        acceptance: running average of the share of drafted layers that were covered; 0.5 before any block.
        blocks: blocks so far.
        outcomes: of the last block's drafted layers that were reached, whether each was covered.
    """

    acceptance: float = 0.5
    blocks: int = 0
    outcomes: tuple[bool, ...] = ()

    def updated(self, drafted: int, outcomes: tuple[bool, ...], rate: float = 0.2) -> History:
        """The history after a block that drafted so many layers, with these outcomes."""
        change = rate * (sum(outcomes) / drafted - self.acceptance) if drafted else 0.0
        return History(self.acceptance + change, self.blocks + 1, outcomes)


@dataclass
class Row:
    """A prompt in the pool.

    Attributes:
        notes: whatever the width policy wants to remember about this prompt.
    """

    index: int
    request: Request
    forest: Forest
    live: Beams
    finished: FinishedBeams
    history: History
    stats: DecodeStats = field(default_factory=DecodeStats)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        """Tokens generated so far by every live beam."""
        return int(self.live.sequences_LT.shape[1] - self.request.prompt_T.shape[0])

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.config.max_new_tokens - self.generated
