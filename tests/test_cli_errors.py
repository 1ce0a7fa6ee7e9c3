"""Bad input on the command line: exit code 2, one line that names it, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from beamwise.cli import main
from tests.tiny_folder import run_generate, save_tiny_folder


def assert_refused(code: int, captured: Any, *fragments: str) -> None:
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("beamwise: error: ")
    assert captured.err.count("\n") == 1
    for fragment in fragments:
        assert fragment in captured.err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "--prompt TEXT or --prompts"),
        (["--prompt", "hi", "--prompts", "x.jsonl"], "either --prompt"),
        (["--prompt", "  "], "empty"),
        (["--prompt", "hi", "--nonsense", "1"], "--nonsense"),
        (["--prompt", "hi", "--num-beams", "many"], "--num-beams"),
        (["--prompt", "hi", "--num-beams", "0"], "at least 1 beam"),
        (["--prompt", "hi", "--max-new-tokens", "0"], "at least 1 token"),
        (["--prompt", "hi", "--num-return-sequences", "5"], "num_return_sequences is 5"),
        (["--prompt", "hi", "--early-stopping", "maybe"], "'never'"),
        (["--prompt", "hi", "--top-k", "5"], "--do-sample"),
        (["--prompt", "hi", "--seed", "5"], "--do-sample"),
        (["--prompt", "hi", "--do-sample", "--temperature", "0"], "--temperature is 0"),
        (["--prompt", "hi", "--do-sample", "--top-p", "1.5"], "--top-p is 1.5"),
        (["--prompt", "hi", "--do-sample", "--top-k", "-1"], "--top-k is -1"),
        (["--prompt", "hi", "--do-sample", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "hi", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["--prompt", "hi", "--no-repeat-ngram-size", "-2"], "--no-repeat-ngram-size is -2"),
        (["--prompt", "hi", "--dtype", "int8"], "--dtype"),
        (["--prompt", "hi", "--drafter", "oracle"], "'lookup'"),
        (["--prompt", "hi", "--drafter", "lookup", "--draft", "somewhere"], "--draft 'somewhere'"),
        (["--prompt", "hi", "--drafter", "model", "--draft", "none"], "--drafter lookup"),
        (["--prompt", "hi", "--out", "/no/such/folder/out.jsonl"], "does not exist"),
        (["--prompts", "/no/such/prompts.jsonl"], "/no/such/prompts.jsonl"),
        (["--prompt", "hi", "--target", "./no-such-model"], "./no-such-model"),
        (["--config", "/no/such/config.yaml"], "config"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(main(["generate", *arguments]), capsys.readouterr(), fragment)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(main(["generalise"]), capsys.readouterr(), "generalise", "generate")


def test_missing_required_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(main(["distil", "--max-steps", "3"]), capsys.readouterr(), "--prompts, --validation-prompts")


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (b'{"prompt": "the cat"', "not JSON"),
        (b'["the cat"]', "list"),
        (b'{"text": "the cat"}', "no text under 'prompt'"),
        (b'{"prompt": 3}', "no text under 'prompt'"),
        (b'{"prompt": " "}', "empty"),
        (b'{"prompt": "\xff"}', "not JSON"),
    ],
)
def test_bad_line_of_a_prompts_file(
    line: bytes, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    code = main(["generate", "--prompts", str(path), "--out", str(tmp_path / "out.jsonl")])
    assert_refused(code, capsys.readouterr(), fragment, f"{path}, line 3")
    assert not (tmp_path / "out.jsonl").exists()


def test_empty_prompts_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    assert_refused(main(["generate", "--prompts", str(path)]), capsys.readouterr(), "is empty")


def test_unknown_option_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("prompt: hi\nbeams: 4\n")
    assert_refused(main(["generate", "--config", str(path)]), capsys.readouterr(), "beams")


def test_prompt_beyond_the_models_positions(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "cat"}) + "\n" + json.dumps({"prompt": "cat " * 600}) + "\n")
    code = run_generate(tiny_folder, "--prompts", str(path))
    assert_refused(code, capsys.readouterr(), "line 2", "600 tokens", "512 positions")


def test_more_beams_than_the_vocabulary_allows(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_generate(tiny_folder, "--prompt", "the cat", "--num-beams", "40")
    assert_refused(code, capsys.readouterr(), "num_beams=40", "fewer beams")


def test_draft_of_another_vocabulary(
    tiny_folder: str, tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], capsys: pytest.CaptureFixture[str]
) -> None:
    draft = save_tiny_folder(tmp_path / "draft", tiny_llama(vocab_size=40))
    code = run_generate(tiny_folder, "--prompt", "the cat", "--draft", draft)
    assert_refused(code, capsys.readouterr(), "40 tokens", "48")


def test_model_that_returns_nan(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(vocab_size=48)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    code = run_generate(save_tiny_folder(tmp_path / "nan", model), "--prompt", "the cat")
    assert_refused(code, capsys.readouterr(), "NaN")


def test_no_traceback_from_the_installed_command() -> None:
    command = [sys.executable, "-m", "beamwise.cli", "generate", "--prompt", "hi", "--num-beams", "0"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
