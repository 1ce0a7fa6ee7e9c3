"""Hardware files: the roofline by hand, every shipped file, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamwise.controller.hardware import load_hardware
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import FormatError

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "hardware").glob("*.yaml"))
ROOFLINE = """
device: toy
roofline: {bandwidth_gb_s: 100, compute_tflop_s: 1, bandwidth_share: 0.5, forward_ms: 0.25}
target: {parameters: 1e+9, bytes_per_parameter: 2}
block_ms: 3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "toy.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files(path: Path) -> None:
    profile = load_hardware(path)
    assert profile.device
    assert profile.source
    assert 0.0 < profile.draft(1) < profile.target(1) < profile.target(1024)


def test_there_are_shipped_files() -> None:
    assert {path.stem for path in SHIPPED} == {"h100_llama8b", "flat_to_64"}


def test_roofline_by_hand(tmp_path: Path) -> None:
    """2 GB at 50 GB/s are 40 ms; a token's 2e9 operations at 1e12 a second are 2 ms: from 20 tokens on it computes."""
    profile = load_hardware(write(tmp_path, ROOFLINE))
    assert [profile.target(tokens) for tokens in (1, 20, 30)] == pytest.approx([40.25, 40.25, 60.25])
    assert profile.target(10_000) == pytest.approx(20_000.25)
    assert profile.draft(8) == 0.0
    assert (profile.block_ms, profile.layer_ms, profile.call_ms, profile.device) == (3.0, 0.0, 0.0, "toy")


def test_a_measured_profile_is_a_hardware_file(tmp_path: Path) -> None:
    measured = LatencyProfile((1, 8), (10.0, 12.0), (1.0, 2.0), call_ms=5.0, device="here")
    measured.save(tmp_path / "measured.json")
    assert load_hardware(tmp_path / "measured.json") == measured


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("bandwidth_gb_s: 100", "bandwidth_gb_s: fast", "roofline.bandwidth_gb_s"),
        ("bandwidth_gb_s: 100, ", "", "lacks bandwidth_gb_s"),
        ("bandwidth_share: 0.5", "bandwidth_share: 1.5", "roofline.bandwidth_share"),
        ("forward_ms: 0.25", "forward_ms: -1", "roofline.forward_ms"),
        ("parameters: 1e+9", "parameters: 0", "target.parameters"),
        ("parameters: 1e+9", "parameters: true", "target.parameters"),
        ("parameters: 1e+9", "parameters: 1e+300", "target.parameters"),
        ("bandwidth_gb_s: 100", "bandwidth_gb_s: 1e-320", "roofline.bandwidth_gb_s"),
        ("bytes_per_parameter: 2", "bits: 16", "lacks bytes_per_parameter"),
        ("target:", "draft:", "lacks target"),
        ("block_ms: 3", "block_ms: .nan", "block_ms"),
        ("block_ms: 3", "colour: red", "colour"),
        ("roofline: {", "roofline: 3\nother: {", "other"),
        ("{parameters: 1e+9, bytes_per_parameter: 2}", "[1, 2]", "target"),
        ("roofline:", "ceiling:", "tokens, target_ms, draft_ms"),
        ("device: toy", "device: [", "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in ROOFLINE
    path = write(tmp_path, ROOFLINE.replace(old, new))
    with pytest.raises(FormatError) as caught:
        load_hardware(path)
    assert "toy.yaml" in str(caught.value)
    assert field in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read as a hardware file"):
        load_hardware(tmp_path / "none.yaml")
