"""`beamwise demo` on a tiny model: side by side, and the whole loop before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from beamwise.cli import main
from tests.conftest import make_tiny_llama
from tests.tiny_folder import save_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"), make_tiny_llama(vocab_size=48))


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("the cat", "who sees the moon", "one two")))
    return str(path)


def test_demo_on_a_tiny_model(folder: str, prompts_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", folder, "--prompts", prompts_file, "--device", "cpu", "--dtype", "float32"]
    assert main(["demo", *arguments, "--max-new-tokens", "6", "--no-learn"]) == 0
    words = capsys.readouterr().out
    assert words.count("3 of 3") >= 3  # equal outputs; by the paper's rule they may differ
    assert "paper's rule" in words
    assert "n-gram lookup" in words


@pytest.mark.slow
def test_demo_learns_a_controller_first(
    folder: str, prompts_file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole loop on a tiny model: collect, profile, train, export, decode."""
    arguments = ["--target", folder, "--prompts", prompts_file, "--device", "cpu", "--dtype", "float32"]
    out = tmp_path / "demo"
    assert main(["demo", *arguments, "--max-new-tokens", "6", "--learn-prompts", "16", "--out", str(out)]) == 0
    words = capfd.readouterr().out
    assert words.count("3 of 3") >= 4  # transformers, no drafts, fixed widths, learned controller: equal outputs
    assert "learned" in words
    for name in ("traces/manifest.json", "profile.json", "controller/model.safetensors", "controller/report.md"):
        assert (out / name).is_file()
