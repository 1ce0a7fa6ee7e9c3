"""The command line: exit codes and messages, files in and out, on a tiny model; once on the real one."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docstring_parser import parse as parse_docstring
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from beamwise.cli import COMMANDS, main
from tests.tiny_folder import CHAT_TEMPLATE, save_tiny_folder

PROMPTS = [
    {"id": "first", "prompt": "the cat sees", "category": "animals"},
    {"id": "second", "prompt": "one two three red blue green one two", "category": "lists"},
    {"prompt": "who likes the moon", "answer": 7},
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., LlamaForCausalLM]) -> str:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"), tiny_llama(vocab_size=48))


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS) + "\n\n")
    return str(path)


def run_generate(target: str, *arguments: str) -> int:
    return main(["generate", "--target", target, "--device", "cpu", "--max-new-tokens", "8", *arguments])


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def decode_file(target: str, prompts_file: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.jsonl"
    assert run_generate(target, "--prompts", prompts_file, "--out", str(out), *arguments) == 0
    return read_jsonl(out)


def without_costs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in ("stats", "scores")} for record in records]


# --- help and the registry


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "usage: beamwise" in capsys.readouterr().out


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_help_waits_for_no_library() -> None:
    code = (
        "import sys; from beamwise.cli import build_parser; build_parser('generate').format_help(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_spells_out_what_generate_does_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "generate uses 50" in words
    assert "--num-beams" in words
    assert "[default: 4]" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_every_option_documented(name: str) -> None:
    command = COMMANDS[name]
    references = [command.run] if command.options is None else [command.run, command.options]
    found = []
    for reference in references:
        module, attribute = reference.split(":")
        found.append(getattr(importlib.import_module(f"beamwise.{module}"), attribute))
    if command.options is not None:
        documented = {param.arg_name for param in parse_docstring(found[1].__doc__).params if param.description}
        assert documented == {item.name for item in dataclasses.fields(found[1])}


# --- bad input: exit code 2, one line, no traceback


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


def test_prompt_beyond_the_models_positions(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "cat"}) + "\n" + json.dumps({"prompt": "cat " * 600}) + "\n")
    code = run_generate(folder, "--prompts", str(path))
    assert_refused(code, capsys.readouterr(), "line 2", "600 tokens", "512 positions")


def test_more_beams_than_the_vocabulary_allows(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_generate(folder, "--prompt", "the cat", "--num-beams", "40")
    assert_refused(code, capsys.readouterr(), "num_beams=40", "fewer beams")


def test_draft_of_another_vocabulary(
    folder: str, tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], capsys: pytest.CaptureFixture[str]
) -> None:
    draft = save_tiny_folder(tmp_path / "draft", tiny_llama(vocab_size=40))
    code = run_generate(folder, "--prompt", "the cat", "--draft", draft)
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


# --- decoding


def test_a_prompt_prints_its_text_and_nothing_else(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(folder, "--prompt", "the cat sees") == 0
    captured = capsys.readouterr()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the cat sees", return_tensors="pt")
    expected = model.generate(**inputs, num_beams=4, max_new_tokens=8, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert captured.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert captured.err == ""


def test_file_in_file_out(folder: str, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = decode_file(folder, prompts_file, tmp_path, "--num-return-sequences", "2")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3 prompts" in captured.err
    assert [record["id"] for record in records] == ["first", "second", "prompts-3"]
    for record, prompt in zip(records, PROMPTS, strict=True):
        assert prompt.items() <= record.items()
        assert record["texts"][0] == record["text"]
        assert len(record["texts"]) == 2
        assert record["scores"] == sorted(record["scores"], reverse=True)
        assert 1 <= record["stats"]["tokens"] <= 8
        assert record["stats"]["target_forwards"] >= 1
        assert record["stats"]["mean_acceptance_length"] >= 1
        assert record["stats"]["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out.jsonl"]


def test_file_to_stdout(folder: str, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(folder, "--prompts", prompts_file) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert without_costs(printed) == without_costs(decode_file(folder, prompts_file, tmp_path))


@pytest.mark.parametrize(
    "search",
    [
        [],
        ["--num-beams", "1"],
        ["--do-sample", "--seed", "3", "--temperature", "1.5"],
        ["--repetition-penalty", "1.7"],
        ["--do-sample", "--seed", "3", "--no-repeat-ngram-size", "2"],
        ["--length-penalty", "2", "--early-stopping", "never"],
    ],
    ids=" ".join,
)
def test_batches_and_drafts_change_no_output(search: list[str], folder: str, prompts_file: str, tmp_path: Path) -> None:
    expected = without_costs(decode_file(folder, prompts_file, tmp_path, *search, "--batch-size", "1"))
    for how in (
        ["--batch-size", "3"],
        ["--drafter", "none"],
        ["--draft", folder, "--gamma", "2", "--draft-width", "9"],
    ):
        assert without_costs(decode_file(folder, prompts_file, tmp_path, *search, *how)) == expected


def test_a_prompts_result_does_not_depend_on_its_neighbours(folder: str, prompts_file: str, tmp_path: Path) -> None:
    options = ["--repetition-penalty", "1.7", "--no-repeat-ngram-size", "2"]
    together = decode_file(folder, prompts_file, tmp_path, *options)
    for record in together:
        alone = tmp_path / "alone.jsonl"
        alone.write_text(json.dumps({"prompt": record["prompt"]}) + "\n")
        assert decode_file(folder, str(alone), tmp_path, *options)[0]["text"] == record["text"]


def test_sampling_names_its_seed_and_repeats_with_it(folder: str, prompts_file: str, tmp_path: Path) -> None:
    first = decode_file(folder, prompts_file, tmp_path, "--do-sample")
    again = decode_file(folder, prompts_file, tmp_path, "--do-sample", "--seed", str(first[0]["seed"]))
    other = decode_file(folder, prompts_file, tmp_path, "--do-sample", "--seed", "1")
    assert without_costs(again) == without_costs(first)
    assert [record["text"] for record in other] != [record["text"] for record in first]


def test_config_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"prompt: the cat\ntarget: {folder}\ndevice: cpu\nnum_beams: 3\nnum_return_sequences: 3\n")
    assert main(["generate", "--config", str(path), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.count("\n\n") == 2


def test_chat_template(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_folder(tmp_path / "chat", tiny_llama(vocab_size=48), CHAT_TEMPLATE)
    assert run_generate(folder, "--prompt", "the cat") == 0
    with_template = capsys.readouterr().out
    assert run_generate(folder, "--no-chat-template", "--prompt", "who the cat what") == 0
    assert capsys.readouterr().out == with_template
    assert run_generate(folder, "--no-chat-template", "--prompt", "the cat") == 0
    assert capsys.readouterr().out != with_template


def test_interrupted(
    folder: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    monkeypatch.setattr("beamwise.commands.decode.decode_prompts", interrupt)
    assert run_generate(folder, "--prompts", prompts_file, "--out", str(out)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert out.read_text() == "earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


@pytest.mark.smollm2
def test_the_real_model(smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "dna", "prompt": "Where can you find dna in the body?"}) + "\n")
    record = decode_file("smollm2-135m", str(path), tmp_path, "--max-new-tokens", "12")[0]
    turns = [{"role": "user", "content": "Where can you find dna in the body?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    expected = model.generate(**inputs, num_beams=4, max_new_tokens=12, do_sample=False)
    assert record["text"] == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
