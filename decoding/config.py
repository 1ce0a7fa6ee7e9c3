"""The settings of the decoder, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ConfigError

Verification = Literal["coupled", "rejection"]
Law = Literal["distinct", "replacement"]
Warping = Literal["per_beam", "joint"]
WidthMode = Literal["exact", "dynamic"]
RunnerName = Literal["auto", "eager", "buckets", "graphs", "compile"]

_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind)
    for name, kind in (
        ("verification", Verification),
        ("law", Law),
        ("warping", Warping),
        ("width_mode", WidthMode),
        ("runner", RunnerName),
    )
}


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
        verification: ``"coupled"`` (transformers' own beam search or sampling, whatever drafts) or ``"rejection"`` (the
            paper's: beams are draws from the target's joint distribution; sampling only).
        law: of rejection verification: ``"distinct"`` draws a layer's beams without replacement, ``"replacement"``
            independently (the paper's Theorem 3.1).
        warping: of rejection verification: temperature, top-k, top-p and min-p act on each beam's next token
            (``"per_beam"``, as in transformers) or on the distribution over (beam, token) at once (``"joint"``, the
            paper's).
        width_mode: ``"exact"`` keeps ``num_beams`` beams at every layer; ``"dynamic"`` keeps as many as the width
            policy says (the paper's §3.2), which changes the law of the output for speed.
        min_width: dynamic mode: fewest beams drawn at a layer.
        carry_beams: dynamic mode: beams that a block hands to the next one, the likeliest (the paper's §3.4 has 1);
            None hands over all.
        runner: of the models' forwards: ``"eager"``; ``"buckets"`` (padded to static shapes); ``"graphs"`` (these as
            CUDA graphs); ``"compile"`` (these through ``torch.compile``); ``"auto"`` takes graphs on CUDA, else eager.

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
    verification: Verification = "coupled"
    law: Law = "distinct"
    warping: Warping = "per_beam"
    width_mode: WidthMode = "exact"
    min_width: int = 1
    carry_beams: int | None = None
    runner: RunnerName = "auto"

    @property
    def rejection(self) -> bool:
        """Whether the paper's verification is used."""
        return self.verification == "rejection"

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
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: use {' or '.join(map(repr, allowed))}")
        self._check_variant()

    def _check_variant(self) -> None:
        if self.rejection and not self.do_sample:
            raise ConfigError(
                "verification='rejection' accepts random draws, so it needs do_sample=True; for greedy beam search use "
                "verification='coupled'"
            )
        if not self.rejection and (self.law != "distinct" or self.warping != "per_beam"):
            raise ConfigError("law and warping are for verification='rejection': set that too, or leave them out")
        if not 1 <= self.min_width <= self.num_beams:
            raise ConfigError(f"min_width is {self.min_width}: it must lie between 1 and num_beams ({self.num_beams})")
        if self.carry_beams is None:
            return
        if not 1 <= self.carry_beams <= self.num_beams:
            raise ConfigError(
                f"carry_beams is {self.carry_beams}: it must lie between 1 and num_beams ({self.num_beams})"
            )
        if self.width_mode == "exact":
            raise ConfigError("carry_beams drops beams, which exact mode never does: set width_mode='dynamic' too")
