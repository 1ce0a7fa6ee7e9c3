"""Every command and every line of Python in the README runs; where a test would take too long, with less to decode."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from beamwise.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

ADDED_ARGUMENTS = {
    'beamwise generate --prompt "Where can you find dna in the body?" --num-beams 4 --max-new-tokens 64': (
        "--max-new-tokens 8"
    ),
    "beamwise generate --prompts prompts.jsonl --out texts.jsonl --do-sample --temperature 0.7 --seed 1": (
        "--max-new-tokens 8"
    ),
    "beamwise generate --prompts prompts.jsonl --out texts.jsonl --width-mode dynamic --quality 0.5": (
        "--max-new-tokens 8"
    ),
    'beamwise generate --prompt "Where can you find dna in the body?" --do-sample --verification rejection': (
        "--max-new-tokens 8"
    ),
    "beamwise generate --help": "",
    "beamwise demo --dtype float32": "--max-new-tokens 3 --no-learn",
}
"""Each command of the README, and what the test adds to it to be quick. A command that is not here fails the test."""

MAKE_TARGETS = {"make demo": "$(BIN)/beamwise demo", "make test": "$(BIN)/pytest"}
"""Commands that a test cannot run inside itself, and what the Makefile must do for them."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    inline = re.findall(r"`(beamwise \w+ --[^`]*)`", README)
    return [line for block in blocks("sh") for line in block.splitlines()] + inline


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_make_targets(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{command.removeprefix('make ')}:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None
    assert MAKE_TARGETS[command] in recipe[1]


@pytest.mark.smollm2
@pytest.mark.parametrize("command", [command for command in commands() if not command.startswith("make ")])
def test_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("json")
    (tmp_path / "prompts.jsonl").write_text(example)
    program, *arguments = shlex.split(f"{command} {ADDED_ARGUMENTS[command]}")
    assert program == "beamwise"
    try:
        code = main(arguments)
    except SystemExit as stop:  # --help
        code = int(stop.code or 0)
    assert code == 0
    if "--out" in arguments:
        record = json.loads((tmp_path / "texts.jsonl").read_text())
        assert json.loads(example).items() <= record.items()
        assert {"text", "texts", "scores", "stats"} <= set(record)
    else:
        assert capsys.readouterr().out.strip()


@pytest.mark.smollm2
def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    assert "max_new_tokens=64" in code
    exec(code.replace("max_new_tokens=64", "max_new_tokens=8"), {})
    *text, costs = capsys.readouterr().out.strip().splitlines()
    assert "".join(text)
    forwards, acceptance = costs.split()
    assert 1 <= int(forwards) <= 8
    assert float(acceptance) >= 1
