"""What decoding cost: counters and wall-clock shares, apart from the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch


@dataclass
class DecodeStats:
    """Counters of one prompt, or of several added up.

    Attributes:
        target_forwards: forwards of the target in which the prompt took part, the prompt's own included.
        draft_forwards: forwards of the draft in which it took part.
        layers: tokens by which all its beams advanced.
        widths: beams asked for, summed over these layers.
        drafted_nodes: nodes proposed.
        target_tokens: tokens computed by the target, the prompt's included.
        peak_slots: most KV slots in use after a block (a maximum, not a sum).
    """

    target_forwards: int = 0
    draft_forwards: int = 0
    layers: int = 0
    widths: int = 0
    drafted_nodes: int = 0
    target_tokens: int = 0
    peak_slots: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Layers advanced per target forward, the bonus counted."""
        return self.layers / max(self.target_forwards, 1)

    @property
    def mean_width(self) -> float:
        """Beams per layer: ``num_beams`` in exact mode."""
        return self.widths / max(self.layers, 1)

    def add(self, other: DecodeStats) -> None:
        """Add another prompt's counters."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name == "peak_slots" else mine + theirs)


@dataclass
class Stopwatch:
    """Wall-clock seconds by part. On a GPU it waits for the device at each boundary, but only while ``enabled``."""

    device: torch.device
    enabled: bool = True
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time of the block to ``part``; parts nest: an inner part is not counted in the outer one."""
        if not self.enabled:
            yield
            return
        start, inside = self._now(), sum(self.seconds.values())
        yield
        nested = sum(self.seconds.values()) - inside
        self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - start - nested

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
