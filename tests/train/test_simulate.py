"""The simulator: a prompt's time by hand and by drawing blocks, devices on which speculation pays or does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from beamwise.cli import main
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import ConfigError, InputError
from beamwise.train.replay import Replayed
from beamwise.train.simulate import PromptShape, decoding_ms, predict_rate, prompt_shapes, simulate
from tests.controller.test_checkpoint import make_controller

from .synthetic import SyntheticWorld

BLOCK = Replayed(1.75, 1.75, 16.0, 2.0, 100, tails=(0.5, 0.25), layer_ms=(4.0, 2.0))
"""Without drafts 10 ms; the first layer adds 4 and is covered in half of the blocks, the second 2 and in a quarter."""
FLAT = LatencyProfile((1, 1024), (20.0, 20.0), (0.1, 0.1), device="flat")
LINEAR = LatencyProfile((1, 1024), (20.0, 20_480.0), (10.0, 10.0), device="linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(SyntheticWorld(seed=3).write(tmp_path_factory.mktemp("simulated"), prompts=40, beams=(1, 2)))


def test_a_prompt_by_hand() -> None:
    one = 10.0
    two = 14.0 + 0.5 * one
    three = 16.0 + 0.5 * two + 0.25 * one
    assert decoding_ms(BLOCK, 3) == pytest.approx([0.0, one, two, three])


def test_a_prompt_by_drawing_blocks() -> None:
    generator, total = np.random.default_rng(0), 0.0
    for _ in range(4000):
        left = 12
        while left:
            drafted = min(2, left - 1)
            total += 10.0 + sum(BLOCK.layer_ms[:drafted])
            level = generator.random()
            left -= 1 + sum(level < tail for tail in BLOCK.tails[:drafted])
    assert decoding_ms(BLOCK, 12)[12] == pytest.approx(total / 4000, rel=0.01)


def test_long_texts_have_the_rate_of_the_blocks() -> None:
    profile = LatencyProfile((1, 2), (10.0, 12.0), (1.0, 2.0), call_ms=7.0)
    rate = predict_rate(BLOCK, [PromptShape(1, 20_000)], profile)
    assert rate == pytest.approx(BLOCK.rate, rel=1e-3)
    # reading ten tokens more: 18 ms of the target, 9 of the draft
    off = Replayed(1.0, 1.0, 10.0, 0.0, 100, tails=(0.0,), layer_ms=(0.0,))
    assert predict_rate(off, [PromptShape(10, 4)], profile) == pytest.approx(4e3 / (7.0 + 18.0 + 40.0))
    assert predict_rate(BLOCK, [PromptShape(10, 1)], profile) == pytest.approx(1e3 / (7.0 + 27.0 + 10.0))


def test_prompts_of_traces(folder: str) -> None:
    shapes = prompt_shapes(folder)
    assert len(shapes) == 40
    assert shapes["prompt 0"] == PromptShape(tokens=4, positions=24)  # 12 blocks of 2 layers


def test_speculation_pays_where_verification_is_free(folder: str) -> None:
    for group in simulate([folder], make_controller(), FLAT, prompts="all").groups.values():
        off, shallow, deep = (group.of(name) for name in ("off", "fixed 1x64", "fixed 3x64"))
        assert off is not None
        assert shallow is not None
        assert deep is not None
        assert off.tokens_per_second < shallow.tokens_per_second < deep.tokens_per_second
        assert off.tokens_per_second == pytest.approx(50.0)
        assert group.chosen.startswith("fixed 3x")


def test_it_does_not_where_every_token_costs_as_much(folder: str) -> None:
    for group in simulate([folder], make_controller(), LINEAR, prompts="all").groups.values():
        off, learned, chosen = (group.of(name) for name in ("off", "learned", group.chosen))
        assert off is not None
        assert learned is not None
        assert chosen is not None
        assert chosen.tokens_per_second < off.tokens_per_second
        assert chosen.policy.startswith("fixed 1x")
        assert learned.tokens_per_second > chosen.tokens_per_second  # it sees the price, and hardly drafts


def test_positions_can_be_asked_for(folder: str) -> None:
    free_reading = LatencyProfile((1, 1024), (20.0, 20.0), (0.0, 0.0), call_ms=100.0)
    short, long = (simulate([folder], make_controller(), free_reading, "all", count) for count in (2, 200))
    for name, group in short.groups.items():
        off, same = group.predictions[0], long.groups[name].predictions[0]
        assert off.tokens_per_second == pytest.approx(2e3 / 140.0)
        assert same.tokens_per_second == pytest.approx(200e3 / 4100.0)


def test_too_little(tmp_path: Path, folder: str) -> None:
    few = SyntheticWorld(seed=1).write(tmp_path / "few", prompts=2, blocks=2, beams=(1,))
    with pytest.raises(InputError, match="collect more traces"):
        simulate([str(few)], make_controller(), FLAT)
    many = SyntheticWorld(seed=1).write(tmp_path / "many", prompts=40, beams=(4,))
    with pytest.raises(ConfigError, match="learned from at most 2"):
        simulate([str(many)], make_controller(), FLAT, prompts="all")


def test_the_command(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    controller, hardware = tmp_path / "controller", tmp_path / "flat.yaml"
    make_controller().save_pretrained(controller)
    FLAT.save(hardware)
    command = ["simulate", "--traces", f"[{folder}]", "--controller", str(controller), "--prompts", "all"]
    assert main([*command, "--hardware", str(hardware), "--out", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "Predicted for flat" in printed
    figures = json.loads((tmp_path / "out.json").read_text())
    policies = figures["groups"]["W=2 greedy"]["policies"]
    assert {"off", "learned", "oracle", "fixed 3x64"} < set(policies)
    assert policies["off"]["over_off"] == 1.0
    assert printed.count("| W=2 greedy | fixed") == 1
    assert main([*command, "--grid", "--out", str(tmp_path / "out.md")]) == 0  # the controller's own profile
    printed = capsys.readouterr().out
    assert printed.count("| W=2 greedy | fixed") == len(policies) - 3
    assert (tmp_path / "out.md").read_text() == printed


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--hardware", "none.yaml"], "none.yaml"),
        (["--new-tokens", "0"], "--new-tokens is 0"),
        (["--new-tokens", "3", "--bench", "x"], "exclude each other"),
        (["--out", "figures.txt"], ".json or .md"),
        (["--bench", "nowhere"], "nowhere"),
        (["--traces", "[]"], "--traces is empty"),
        (["--controller", "./nowhere"], "nowhere"),
    ],
)
def test_bad_options(
    extra: list[str], said: str, tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = tmp_path / "controller"
    make_controller().save_pretrained(controller)
    command = ["simulate", "--traces", f"[{folder}]", "--controller", str(controller), "--prompts", "all"]
    assert main([*command, *extra]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
