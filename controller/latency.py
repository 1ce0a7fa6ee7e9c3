"""Latency profiles: what a forward of the draft and of the target costs on a device, by the tokens in it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from beamwise.decoding.errors import ConfigError, FormatError

OVERHEADS = ("layer_ms", "block_ms", "call_ms", "sampling_ms", "ask_ms")
"""Milliseconds besides the forwards; 0 where a file leaves them out."""
MOST_COUNTS = 64
"""Token counts in a profile, at most."""
Forward = Callable[[int], object]
"""Runs one forward over as many new tokens as it is given."""


@dataclass(frozen=True)
class LatencyProfile:
    """Milliseconds by token count. Between the measured counts it is interpolated, beyond them extrapolated.

    Attributes:
        tokens: token counts that were measured, increasing.
        target_ms: of one target forward over as many tokens.
        draft_ms: of one draft forward; all zero for drafters without a model.
        layer_ms: of everything else that a drafted layer costs (drawing candidates, growing the forest).
        block_ms: of everything else that a block costs (verification, pruning).
        call_ms: of everything else that a prompt costs (preparing the call, packing its output).
        sampling_ms: of drawing a beam instead of taking the best; see `when_sampling`.
        ask_ms: of asking one of a controller's networks about a layer, its features included.
        device: where it was measured.
        dtype: of the weights and forwards, as ``"bfloat16"``; empty where that is not known.
        source: how, or where it was published.

    Raises:
        ConfigError: columns of different length, counts that do not increase or are too many, or negative times.
    """

    tokens: tuple[int, ...]
    target_ms: tuple[float, ...]
    draft_ms: tuple[float, ...]
    layer_ms: float = 0.0
    block_ms: float = 0.0
    call_ms: float = 0.0
    sampling_ms: float = 0.0
    ask_ms: float = 0.0
    device: str = ""
    dtype: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.tokens or not len(self.tokens) == len(self.target_ms) == len(self.draft_ms):
            raise ConfigError("A latency profile needs tokens, target_ms and draft_ms of the same length, at least 1")
        if len(self.tokens) > MOST_COUNTS:
            raise ConfigError(f"A latency profile has {len(self.tokens)} token counts: {MOST_COUNTS} at most")
        if self.tokens[0] < 1 or sorted(set(self.tokens)) != list(self.tokens):
            raise ConfigError(f"A latency profile's tokens are {self.tokens}: they must increase from at least 1")
        times = (*self.target_ms, *self.draft_ms, *(getattr(self, name) for name in OVERHEADS))
        if not all(map(math.isfinite, (*self.tokens, *times))):
            raise ConfigError("A latency profile has values that are not finite")
        if min(times) < 0 or max(self.target_ms) <= 0:
            raise ConfigError("A latency profile has negative milliseconds, or a target that costs nothing")

    def target(self, tokens: int) -> float:
        """Milliseconds of one target forward over ``tokens`` tokens."""
        return _interpolate(self.tokens, self.target_ms, tokens)

    def draft(self, tokens: int) -> float:
        """Milliseconds of one draft forward over ``tokens`` tokens."""
        return _interpolate(self.tokens, self.draft_ms, tokens)

    def when_sampling(self, num_beams: int) -> LatencyProfile:
        """The profile where ``num_beams`` beams are drawn: the target's at every block, the draft's at every layer.

        Most layers after the first are not reached, so a layer counts one beam, however many there are.
        """
        layer_ms, block_ms = self.layer_ms + self.sampling_ms, self.block_ms + num_beams * self.sampling_ms
        return dataclasses.replace(self, layer_ms=layer_ms, block_ms=block_ms)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, raw: Any, where: str = "latency profile") -> LatencyProfile:
        """From `to_dict`, or from YAML.

        Raises:
            FormatError: missing, unknown or malformed fields; ``where`` names the source.
        """
        names = {item.name for item in fields(cls)}
        if not isinstance(raw, dict) or not {"tokens", "target_ms", "draft_ms"} <= set(raw) <= names:
            raise FormatError(f"The {where} must have tokens, target_ms, draft_ms and of {sorted(names)} nothing else")
        try:
            columns = {name: tuple(float(value) for value in raw[name]) for name in ("target_ms", "draft_ms")}
            numbers = {name: float(raw[name]) for name in OVERHEADS if name in raw}
            texts = {name: str(raw[name]) for name in ("device", "dtype", "source") if name in raw}
            return cls(tokens=tuple(int(value) for value in raw["tokens"]), **columns, **numbers, **texts)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"The {where} is malformed: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON (or YAML where the name ends in .yaml)."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        if Path(path).suffix in (".yaml", ".yml"):
            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        scratch = Path(path).with_name(f".{Path(path).name}.writing")
        scratch.write_text(text)
        scratch.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyProfile:
        """Read JSON or YAML.

        Raises:
            FormatError: the file cannot be read or is no profile.
        """
        return cls.from_dict(read_yaml(path, "latency profile"), f"latency profile '{path}'")


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """The content of a JSON or YAML file (JSON is YAML).

    Args:
        path: of the file.
        what: it should be, for the message.

    Raises:
        FormatError: it cannot be read, or is neither.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise FormatError(f"'{path}' cannot be read as a {what}: {error}") from error


def _interpolate(counts: Sequence[int], values: Sequence[float], tokens: int) -> float:
    """Piecewise linear, as measured: kernels differ by shape, and more tokens can take less. Beyond, never falling."""
    if tokens <= counts[0] or len(counts) == 1:
        return values[0]
    right = next((index for index, count in enumerate(counts) if tokens <= count), len(counts) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (counts[right] - counts[left])
    if tokens > counts[right]:
        return values[right] + max(slope, 0.0) * (tokens - counts[right])
    return values[left] + slope * (tokens - counts[left])


def measure(
    target_forward: Forward,
    draft_forward: Forward | None,
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 15,
    synchronise: Callable[[], object] | None = None,
    device: str = "",
) -> LatencyProfile:
    """Measure a profile: medians of repeated forwards, all token counts in turn so that drift hits them alike.

    Args:
        target_forward: one target forward over the given number of new tokens, at a typical context length.
        draft_forward: the draft's; None for a drafter without a model.
        tokens: token counts to measure.
        repeats: forwards per count, after two to warm up.
        synchronise: waits for the device, e.g. ``torch.cuda.synchronize``.
        device: name of the device, for the record.

    Returns:
        The profile, without overheads.

    Raises:
        ConfigError: no repeats, or unusable token counts.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: measure at least once")
    samples: dict[str, list[list[float]]] = {name: [[] for _ in tokens] for name in ("target", "draft")}
    for repeat in range(repeats + 2):
        for index, count in enumerate(tokens):
            for name, forward in (("target", target_forward), ("draft", draft_forward)):
                elapsed = 0.0 if forward is None else _time(forward, count, synchronise)
                if repeat >= 2:
                    samples[name][index].append(elapsed)
    medians = {name: tuple(statistics.median(times) for times in columns) for name, columns in samples.items()}
    return LatencyProfile(tuple(tokens), medians["target"], medians["draft"], device=device, source="measured")


def _time(forward: Forward, count: int, synchronise: Callable[[], object] | None) -> float:
    """Milliseconds of one forward."""
    if synchronise is not None:
        synchronise()
    start = time.perf_counter()
    forward(count)
    if synchronise is not None:
        synchronise()
    return 1e3 * (time.perf_counter() - start)
