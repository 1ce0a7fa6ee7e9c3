"""Latency profiles: interpolation, files, measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamwise.controller.latency import LatencyProfile, measure
from beamwise.decoding.errors import ConfigError, FormatError

PROFILE = LatencyProfile((1, 4, 8), (10.0, 16.0, 15.0), (1.0, 1.0, 3.0), layer_ms=0.5, device="test")


def test_interpolates_and_extrapolates() -> None:
    assert PROFILE.target(1) == 10.0
    assert PROFILE.target(0) == 10.0
    assert PROFILE.target(2) == pytest.approx(12.0)
    assert PROFILE.target(6) == pytest.approx(15.5)
    assert PROFILE.target(8) == 15.0  # another kernel: a wider forward can be cheaper
    assert PROFILE.target(20) == 15.0  # but it is not expected to go on like this
    assert PROFILE.draft(6) == pytest.approx(2.0)
    assert PROFILE.draft(10) == pytest.approx(4.0)
    assert LatencyProfile((4,), (7.0,), (0.0,)).target(99) == 7.0


def test_drawing_costs_more() -> None:
    drawn = LatencyProfile((1,), (9.0,), (1.0,), layer_ms=0.5, block_ms=2.0, sampling_ms=0.25).when_sampling(4)
    assert (drawn.layer_ms, drawn.block_ms, drawn.target(1)) == (0.75, 3.0, 9.0)


@pytest.mark.parametrize("name", ["profile.json", "profile.yaml"])
def test_files(tmp_path: Path, name: str) -> None:
    PROFILE.save(tmp_path / name)
    assert LatencyProfile.load(tmp_path / name) == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "just a line",
        "{",
        "tokens: [1]",
        "{tokens: [1], target_ms: [1], draft_ms: [x]}",
        "{tokens: [1], target_ms: [1], draft_ms: [0], colour: 1}",
        "{tokens: [2, 1], target_ms: [1, 1], draft_ms: [0, 0]}",
    ],
)
def test_bad_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.yaml").write_text(text)
    with pytest.raises(FormatError, match="latency profile"):
        LatencyProfile.load(tmp_path / "profile.yaml")
    with pytest.raises(FormatError, match="cannot be read"):
        LatencyProfile.load(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    "columns",
    [((), (), ()), ((1, 2), (1.0,), (0.0,)), ((1,), (-1.0,), (0.0,)), ((1,), (0.0,), (0.0,)), ((0,), (1.0,), (0.0,))],
)
def test_impossible_profiles(columns: tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError):
        LatencyProfile(*columns)


def test_measuring_calls_both_at_every_count() -> None:
    calls: list[tuple[str, int]] = []
    waits: list[int] = []
    profile = measure(
        lambda count: calls.append(("target", count)),
        lambda count: calls.append(("draft", count)),
        tokens=(1, 3),
        repeats=2,
        synchronise=lambda: waits.append(1),
        device="here",
    )
    assert calls == [("target", 1), ("draft", 1), ("target", 3), ("draft", 3)] * 4  # two of them to warm up
    assert len(waits) == 2 * len(calls)
    assert profile.tokens == (1, 3)
    assert profile.device == "here"
    assert measure(lambda count: None, None, tokens=(1,), repeats=1).draft_ms == (0.0,)
    with pytest.raises(ConfigError, match="repeats"):
        measure(lambda count: None, None, repeats=0)
