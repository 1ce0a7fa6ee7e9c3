"""The state of one prompt while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .beams import Beams, FinishedBeams, Hypothesis
from .config import DecodeConfig
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


@dataclass
class Row:
    """A prompt in the pool."""

    index: int
    request: Request
    forest: Forest
    live: Beams
    finished: FinishedBeams
    stats: DecodeStats = field(default_factory=DecodeStats)

    @property
    def generated(self) -> int:
        """Tokens generated so far by every live beam."""
        return int(self.live.sequences_LT.shape[1] - self.request.prompt_T.shape[0])

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.config.max_new_tokens - self.generated
