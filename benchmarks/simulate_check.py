"""Predicted beside measured: a simulation against a folder of ``beamwise bench`` on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import InputError
from beamwise.train.simulate import PromptShape, Simulation, predict_rate

from .methods import TARGET_ONLY
from .metrics import Row
from .report import RESULTS
from .runner import Part
from .settings import parse_shape


@dataclass(frozen=True)
class Line:
    """One method under one setting.

    Attributes:
        setting: its name.
        method: its name in the benchmark.
        measured: positions per second.
        predicted: the same, for the benchmark's prompt lengths and positions.
        measured_length: layers per target forward.
        predicted_length: the same.
    """

    setting: str
    method: str
    measured: float
    predicted: float
    measured_length: float
    predicted_length: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class Check:
    """All that could be compared."""

    lines: Sequence[Line]

    def to_list(self) -> list[dict[str, Any]]:
        """As JSON values."""
        return [{**asdict(line), "error": line.error} for line in self.lines]

    def markdown(self) -> str:
        """One table."""
        rows = [
            f"| {one.setting} | {one.method} | {one.measured:.2f} | {one.predicted:.2f} | {one.error:+.1%} | "
            f"{one.measured_length:.3f} | {one.predicted_length:.3f} |"
            for one in self.lines
        ]
        head = "| setting | method | measured tokens/s | predicted | error | measured layers/forward | predicted |"
        return "\n".join([head, "|---|---|---|---|---|---|---|", *rows]) + "\n"


def compare(simulation: Simulation, profile: LatencyProfile, folder: Path) -> Check:
    """Put a benchmark's speeds beside the predicted ones.

    Methods that nothing was predicted for are left out: transformers' own, dynamic widths, shapes off the grid.

    Args:
        simulation: from traces of the same kinds of decoding, best of the same prompts.
        profile: that it was priced with.
        folder: of the benchmark.

    Raises:
        FormatError: no results, or damaged ones.
        InputError: nothing to compare.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in Part.load(folder / RESULTS).rows:
        groups.setdefault((row.setting, row.method), []).append(row)
    lines = []
    for (setting, method), rows in groups.items():
        kind = f"W={rows[0].num_beams} {'sampling' if rows[0].do_sample else 'greedy'}"
        group = simulation.groups.get(kind)
        prediction = None if group is None else group.of(_policy(method, rows[0].num_beams))
        if prediction is None:
            continue
        positions, forwards = sum(row.positions for row in rows), sum(row.target_forwards for row in rows)
        prompts = [PromptShape(row.prompt_tokens, row.positions) for row in rows]
        rate = predict_rate(prediction.block, prompts, profile)
        measured = positions / sum(row.seconds for row in rows)
        lines.append(Line(setting, method, measured, rate, positions / forwards, prediction.block.layers))
    if not lines:
        raise InputError(
            f"'{folder}' has no method that was simulated: measure target_only, fixed (with --shapes of the grid) or "
            "learned there, with beams and sampling as in the traces"
        )
    return Check(lines)


def _policy(method: str, num_beams: int) -> str:
    """The simulated policy that a benchmark's method is."""
    if method.startswith("fixed "):
        gamma, draft_width = parse_shape(method.removeprefix("fixed "), num_beams)
        return f"fixed {gamma}x{draft_width}"
    return "off" if method == TARGET_ONLY else method
