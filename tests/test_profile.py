"""`beamwise profile` on a tiny model: a file that plans and simulations can be made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from beamwise.cli import main
from beamwise.controller.checkpoint import Controller
from beamwise.controller.hardware import load_hardware
from beamwise.controller.policy import LearnedWidth
from tests.controller.test_checkpoint import make_controller
from tests.tiny_folder import save_tiny_folder


def test_what_is_measured(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    target = save_tiny_folder(tmp_path / "target", tiny_llama(vocab_size=48))
    command = ["profile", "--target", target, "--draft", target, "--drafter", "model", "--device", "cpu"]
    command += ["--tokens", "[1,4]", "--context", "8", "--repeats", "1"]
    assert main([*command, "--out", str(tmp_path / "profile.json")]) == 0
    profile = load_hardware(tmp_path / "profile.json")
    assert profile.tokens == (1, 4)
    assert min(*profile.target_ms, *profile.draft_ms, profile.block_ms, profile.call_ms) > 0.0
    assert min(profile.layer_ms, profile.sampling_ms, profile.ask_ms) >= 0.0
    assert profile.dtype == "bfloat16"
    assert main([*command, "--draft", "none", "--drafter", "lookup", "--out", str(tmp_path / "lookup.yaml")]) == 0
    assert load_hardware(tmp_path / "lookup.yaml").draft_ms == (0.0, 0.0)


def test_asks_as_on_a_device_whose_reads_wait(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    probs_on_device = LearnedWidth.probs_on_device

    def count(policy: LearnedWidth, features: torch.Tensor, num_beams: int) -> torch.Tensor:
        asked.append(num_beams)
        return probs_on_device(policy, features, num_beams)

    monkeypatch.setattr(LearnedWidth, "probs_on_device", count)
    monkeypatch.setattr("beamwise.decoding.drafting.reads_are_free", lambda device: False)
    target = save_tiny_folder(tmp_path / "target", tiny_llama(vocab_size=48))
    command = ["profile", "--target", target, "--draft", target, "--drafter", "model", "--device", "cpu"]
    command += ["--tokens", "[1,4]", "--context", "8", "--repeats", "1", "--out", str(tmp_path / "profile.json")]
    assert main(command) == 0
    assert set(asked) == {4}
    assert load_hardware(tmp_path / "profile.json").ask_ms >= 0.0


def test_a_controller_takes_it_in(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = save_tiny_folder(tmp_path / "target", tiny_llama(vocab_size=48)), tmp_path / "controller"
    controller = make_controller()
    controller.info.models = {"target": target, "draft": "none", "drafter": "lookup"}
    controller.save_pretrained(folder)
    command = ["profile", "--target", target, "--draft", "none", "--drafter", "lookup", "--device", "cpu"]
    command += ["--tokens", "[1,4]", "--context", "8", "--repeats", "1", "--controller", str(folder)]
    assert main([*command, "--dtype", "float32", "--out", str(tmp_path / "profile.json")]) == 0
    profile = load_hardware(tmp_path / "profile.json")
    policies = {dtype: Controller.from_pretrained(folder).policy(dtype=dtype) for dtype in ("float32", "bfloat16")}
    assert policies["float32"].profile == profile
    assert policies["bfloat16"].profile == make_controller().info.profile
    capsys.readouterr()
    assert main([*command, "--drafter", "auto", "--out", str(tmp_path / "other.json")]) == 2
    assert "trained with the drafter 'lookup', not 'auto'" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--tokens", "[4,1]"], "increasing"),
        (["--tokens", str(list(range(1, 66)))], "at most 64"),
        (["--context", "1"], "at least 2"),
        (["--controller", "NOWHERE"], "is no folder"),
    ):
        assert main(["profile", "--out", str(tmp_path / "profile.json"), *options]) == 2
        assert said in capsys.readouterr().err
