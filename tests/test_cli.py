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
from docstring_parser import parse as parse_docstring
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from beamwise.cli import COMMANDS, main
from tests.tiny_folder import CHAT_TEMPLATE, run_generate, save_tiny_folder

PROMPTS = [
    {"id": "first", "prompt": "the cat sees", "category": "animals"},
    {"id": "second", "prompt": "one two three red blue green one two", "category": "lists"},
    {"prompt": "who likes the moon", "answer": 7},
]


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS) + "\n\n")
    return str(path)


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


# --- decoding


def test_a_prompt_prints_its_text_and_nothing_else(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(tiny_folder, "--prompt", "the cat sees") == 0
    captured = capsys.readouterr()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    inputs = tokenizer("the cat sees", return_tensors="pt")
    expected = model.generate(**inputs, num_beams=4, max_new_tokens=8, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert captured.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert captured.err == ""


def test_file_in_file_out(
    tiny_folder: str, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = decode_file(tiny_folder, prompts_file, tmp_path, "--num-return-sequences", "2")
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


def test_file_to_stdout(
    tiny_folder: str, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(tiny_folder, "--prompts", prompts_file) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert without_costs(printed) == without_costs(decode_file(tiny_folder, prompts_file, tmp_path))


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
def test_batches_and_drafts_change_no_output(
    search: list[str], tiny_folder: str, prompts_file: str, tmp_path: Path
) -> None:
    expected = without_costs(decode_file(tiny_folder, prompts_file, tmp_path, *search, "--batch-size", "1"))
    for how in (
        ["--batch-size", "3"],
        ["--drafter", "none"],
        ["--draft", tiny_folder, "--gamma", "2", "--draft-width", "9"],
    ):
        assert without_costs(decode_file(tiny_folder, prompts_file, tmp_path, *search, *how)) == expected


def test_a_prompts_result_does_not_depend_on_its_neighbours(
    tiny_folder: str, prompts_file: str, tmp_path: Path
) -> None:
    options = ["--repetition-penalty", "1.7", "--no-repeat-ngram-size", "2"]
    together = decode_file(tiny_folder, prompts_file, tmp_path, *options)
    for record in together:
        alone = tmp_path / "alone.jsonl"
        alone.write_text(json.dumps({"prompt": record["prompt"]}) + "\n")
        assert decode_file(tiny_folder, str(alone), tmp_path, *options)[0]["text"] == record["text"]


def test_sampling_names_its_seed_and_repeats_with_it(tiny_folder: str, prompts_file: str, tmp_path: Path) -> None:
    first = decode_file(tiny_folder, prompts_file, tmp_path, "--do-sample")
    again = decode_file(tiny_folder, prompts_file, tmp_path, "--do-sample", "--seed", str(first[0]["seed"]))
    other = decode_file(tiny_folder, prompts_file, tmp_path, "--do-sample", "--seed", "1")
    assert without_costs(again) == without_costs(first)
    assert [record["text"] for record in other] != [record["text"] for record in first]


def test_config_file(tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"prompt: the cat\ntarget: {tiny_folder}\ndevice: cpu\nnum_beams: 3\nnum_return_sequences: 3\n")
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
    tiny_folder: str,
    prompts_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    monkeypatch.setattr("beamwise.commands.decode.decode_prompts", interrupt)
    assert run_generate(tiny_folder, "--prompts", prompts_file, "--out", str(out)) == 130
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
