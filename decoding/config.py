"""The settings of the decoder, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError

VERIFICATIONS = ("coupled",)
WIDTH_MODES = ("exact",)


@dataclass(frozen=True)
class DecodeConfig:
    """What the user asks of the search itself; the same whatever speculation does.

    Attributes:
        num_beams: beams (W). 1 is plain greedy decoding or sampling, as in transformers.
        max_new_tokens: longest continuation.
        do_sample: draw beams instead of taking the best ones.
        length_penalty: exponent of the length that divides the score of a finished beam.
        early_stopping: True, False or ``"never"``, as in transformers.
        num_return_sequences: best hypotheses returned per prompt.
        seed: of the noise when sampling.

    Raises:
        ConfigError: a value out of range.
    """

    num_beams: int = 4
    max_new_tokens: int = 128
    do_sample: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ConfigError(f"num_beams is {self.num_beams}: at least 1 beam is needed")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: at least 1 token must be generated")
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}: it must lie between 1 and num_beams "
                f"({self.num_beams})"
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping is {self.early_stopping!r}: use True, False or 'never'")
