"""Predicted beside measured: a simulation against a folder of ``beamwise bench`` on the same device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beamwise.controller.checkpoint import Controller
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import InputError
from beamwise.train.simulate import PromptShape, Simulation, predict_rate, simulate

from .html import Block, Heading, Paragraph, Table
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

    def table(self) -> Table:
        """A line for each."""
        header = "setting", "method", "measured tokens/s", "predicted", "error", "measured layers/forward", "predicted"
        rows = [
            [
                one.setting,
                one.method,
                f"{one.measured:.2f}",
                f"{one.predicted:.2f}",
                f"{one.error:+.1%}",
                f"{one.measured_length:.3f}",
                f"{one.predicted_length:.3f}",
            ]
            for one in self.lines
        ]
        return Table(header, rows)


def compare_folder(simulation: Simulation, profile: LatencyProfile, folder: Path) -> Check:
    """Put the speeds of a benchmark's folder beside the predicted ones, see `compare`.

    Raises:
        FormatError: no results, or damaged ones.
        InputError: nothing to compare.
    """
    check = compare(simulation, profile, Part.load(folder / RESULTS).rows)
    if not check.lines:
        raise InputError(
            f"'{folder}' has no method that was simulated: measure target_only, fixed (with --shapes of the grid) or "
            "learned there, with beams and sampling as in the traces"
        )
    return check


def compare(simulation: Simulation, profile: LatencyProfile, rows: Sequence[Row]) -> Check:
    """Put a benchmark's speeds beside the predicted ones.

    Methods that nothing was predicted for are left out: transformers' own, dynamic widths, shapes off the grid.

    Args:
        simulation: from traces of the same kinds of decoding, best of the same prompts.
        profile: that it was priced with.
        rows: of the benchmark.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.setting, row.method), []).append(row)
    lines = []
    for (setting, method), group in groups.items():
        num_beams, do_sample = group[0].num_beams, group[0].do_sample
        simulated = simulation.groups.get(f"W={num_beams} {'sampling' if do_sample else 'greedy'}")
        prediction = None if simulated is None else simulated.of(_policy(method, num_beams))
        if prediction is None:
            continue
        positions, forwards = sum(row.positions for row in group), sum(row.target_forwards for row in group)
        prompts = [PromptShape(row.prompt_tokens, row.positions) for row in group]
        rate = predict_rate(prediction.block, prompts, profile)
        measured = positions / sum(row.seconds for row in group)
        lines.append(Line(setting, method, measured, rate, positions / forwards, prediction.block.layers))
    return Check(lines)


def _policy(method: str, num_beams: int) -> str:
    """The simulated policy that a benchmark's method is."""
    if method.startswith("fixed "):
        gamma, draft_width = parse_shape(method.removeprefix("fixed "), num_beams)
        return f"fixed {gamma}x{draft_width}"
    return "off" if method == TARGET_ONLY else method


def predict_section(folders: Sequence[str], controller: Controller) -> Callable[[Sequence[Row]], list[Block]]:
    """Predict from traces, by the controller's own profile, before anything is measured.

    Args:
        folders: of traces.
        controller: that the benchmark decodes with.

    Returns:
        Makes a section of the report of the benchmark's rows.

    Raises:
        ConfigError: a controller without a profile.
        FormatError: damaged or foreign traces.
        InputError: too few blocks.
    """
    profile = controller.policy().profile
    simulation = simulate(folders, controller, profile, prompts="all")
    about = f"Predicted from {', '.join(folders)} with the controller's latency profile (docs/simulator.md)."

    def section(rows: Sequence[Row]) -> list[Block]:
        return [Heading("Predicted beside measured"), Paragraph(about), compare(simulation, profile, rows).table()]

    return section
