"""What a benchmark asks of every method: the points of its grid, the options they share, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from beamwise.decoding.errors import BeamwiseError, ConfigError
from beamwise.decoding.stats import DecodeStats
from beamwise.decoding.widths import FixedWidth


class UnavailableError(BeamwiseError):
    """A method cannot run under a setting; the message says why."""


@dataclass(frozen=True)
class Setting:
    """A point of the grid: what every method is asked for.

    Attributes:
        num_beams: beams (W).
        do_sample: draw beams instead of taking the best ones.
        dtype: of the weights and the forward pass.
        device: as torch names it.
    """

    num_beams: int
    do_sample: bool
    dtype: str
    device: str

    @property
    def name(self) -> str:
        """For tables."""
        return f"W={self.num_beams} {'sampling' if self.do_sample else 'greedy'} {self.dtype} {self.device}"

    @property
    def slug(self) -> str:
        """For file names."""
        return self.name.replace(" ", "_").replace("=", "").replace(":", "-")


@dataclass(frozen=True)
class MethodOptions:
    """What methods share over the whole grid.

    Attributes:
        max_new_tokens: longest continuation.
        seed: of everything drawn.
        drafter: what proposes tokens to the methods that speculate.
        controller: folder or id of the controller, or None where there is none.
        threshold: the paper's t.
        min_width: fewest beams at a layer where widths are dynamic.
        quality: the controller's price of narrow layers.
        temperature: when sampling; None leaves it to the model's generation_config.
        top_k: the same.
        lookup_tokens: tokens that assisted generation looks up in the prompt at once.
        oracle: depth and draft width that the oracle tries at every position.
    """

    max_new_tokens: int
    seed: int = 0
    drafter: str = "auto"
    controller: str | None = None
    threshold: float = 0.7
    min_width: int = 1
    quality: float = 0.5
    temperature: float | None = None
    top_k: int | None = None
    lookup_tokens: int = 4
    oracle: tuple[int, int] = (4, 16)

    def arguments(self, setting: Setting) -> dict[str, Any]:
        """Keyword arguments of ``model.generate``."""
        chosen: dict[str, Any] = {"num_beams": setting.num_beams, "max_new_tokens": self.max_new_tokens}
        chosen["do_sample"] = setting.do_sample
        sampling = {"temperature": self.temperature, "top_k": self.top_k} if setting.do_sample else {}
        return {**chosen, **{name: value for name, value in sampling.items() if value is not None}}


@dataclass
class Output:
    """One decoded prompt.

    Attributes:
        sequences: new tokens of each returned hypothesis, best first, EOS included.
        stats: counters; ``layers`` are the positions by which the whole search advanced.
        seconds: wall clock by part ("draft", "target"); empty where it was not measured.
        cells: [layer, width, times reached, times covered] of the drafted layers.
    """

    sequences: list[list[int]]
    stats: DecodeStats
    seconds: dict[str, float] = field(default_factory=dict)
    cells: list[list[int]] = field(default_factory=list)


def min_width(setting: Setting, options: MethodOptions) -> int:
    """Fewest beams at a layer: what was asked for, as far as there are so many beams."""
    return min(options.min_width, setting.num_beams)


def parse_shape(shape: str, num_beams: int) -> tuple[int, int]:
    """``"GAMMAxM"``, or ``"GAMMAxauto"`` for ``num_beams`` + 4 candidates, as (gamma, draft width).

    Raises:
        ConfigError: anything else.
    """
    gamma, found, width = shape.partition("x")
    if not found or not gamma.isdigit() or not (width.isdigit() or width == "auto"):
        raise ConfigError(f"fixed shape '{shape}': write GAMMAxM, such as 2x8, or GAMMAxauto for num_beams + 4")
    policy = FixedWidth(int(gamma), num_beams + 4 if width == "auto" else int(width))  # validates
    return policy.gamma, policy.draft_width
