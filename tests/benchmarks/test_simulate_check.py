"""Predicted beside measured, on a benchmark whose clock is the profile itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from beamwise.benchmarks.html import to_html
from beamwise.benchmarks.report import RESULTS
from beamwise.benchmarks.runner import Part
from beamwise.benchmarks.simulate_check import compare_folder, predict_section
from beamwise.cli import main
from beamwise.commands.bench import bench
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import ConfigError, FormatError, InputError
from beamwise.train.simulate import Simulation, simulate
from tests.controller.test_checkpoint import make_controller
from tests.train.synthetic import SyntheticWorld

from .test_metrics import make_row
from .tiny_bench import make_options

PROFILE = LatencyProfile((1, 1024), (20.0, 20.0), (1.0, 1.0), call_ms=50.0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SyntheticWorld(seed=3).write(tmp_path_factory.mktemp("simulated"), prompts=30, beams=(1, 2))


@pytest.fixture(scope="module")
def simulation(traces: Path) -> Simulation:
    return simulate([str(traces)], make_controller(), PROFILE, prompts="all")


def write(folder: Path, methods: dict[str, float]) -> Path:
    """A benchmark of one prompt of ten positions, with the seconds of each method."""
    rows = [make_row("a", seconds, method=name, target_forwards=5) for name, seconds in methods.items()]
    Part(rows, {}).save(folder / RESULTS)
    return folder


def test_a_benchmark_by_the_same_clock(tmp_path: Path, simulation: Simulation) -> None:
    folder = write(tmp_path, {"target only": 0.25, "fixed 1xauto": 0.2, "learned": 0.2, "transformers": 0.3})
    lines = {line.method: line for line in compare_folder(simulation, PROFILE, folder).lines}
    assert set(lines) == {"target only", "fixed 1xauto", "learned"}  # 2 beams + 4 candidates are on the grid
    off = lines["target only"]
    assert (off.measured, off.measured_length) == (40.0, 2.0)
    assert off.predicted == pytest.approx(40.0)  # 50 ms, and ten positions of 20
    assert off.error == pytest.approx(0.0)
    group = simulation.groups["W=2 greedy"].of("fixed 1x6")
    assert group is not None
    assert lines["fixed 1xauto"].predicted_length == group.block.layers
    assert ["s", "target only", "40.00", "40.00"] in [
        row[:4] for row in compare_folder(simulation, PROFILE, folder).table().rows
    ]


def test_nothing_to_compare(tmp_path: Path, simulation: Simulation) -> None:
    with pytest.raises(InputError, match="no method that was simulated"):
        compare_folder(simulation, PROFILE, write(tmp_path, {"transformers": 1.0, "fixed 1x7": 1.0}))
    with pytest.raises(FormatError, match="nowhere"):
        compare_folder(simulation, PROFILE, tmp_path / "nowhere")


def test_a_section_of_the_report(traces: Path) -> None:
    rows = [make_row("a", 0.25, method="target only")]
    page = to_html(predict_section([str(traces)], make_controller(PROFILE))(rows), "report")
    assert "Predicted beside measured" in page
    assert "<td>target only</td><td>40.00</td><td>40.00</td>" in page


def test_a_benchmark_with_traces(tmp_path: Path, traces: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    controller = tmp_path / "controller"
    make_controller(PROFILE).save_pretrained(controller)
    measured: dict[str, object] = {"methods": ["target_only"], "baseline": "target only", "num_beams": [1]}
    options = make_options(tmp_path, tiny_llama, controller=str(controller), traces=[str(traces)], **measured)
    assert "Predicted beside measured" in bench(options).read_text()
    alone = make_options(tmp_path, tiny_llama, controller="none", traces=[str(traces)], **measured)
    with pytest.raises(ConfigError, match="--traces needs a controller"):
        bench(dataclasses.replace(alone, out=str(tmp_path / "other")))


def test_the_command(tmp_path: Path, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    controller = tmp_path / "controller"
    make_controller(PROFILE).save_pretrained(controller)
    folder = write(tmp_path, {"target only": 0.25})
    command = ["simulate", "--traces", f"[{traces}]", "--controller", str(controller), "--prompts", "all"]
    assert main([*command, "--bench", str(folder)]) == 0
    assert "| s | target only | 40.00 | 40.00 |" in capsys.readouterr().out
