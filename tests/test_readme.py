"""Every command and every line of Python in the README runs; where a test would take too long, with less to decode."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from beamwise.cli import main
from beamwise.commands.loading import ASSETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

ADDED_ARGUMENTS = {
    "generate": "--max-new-tokens 6",
    "generate --help": "",
    "demo": "--max-new-tokens 3 --no-learn",
    "collect": "--max-new-tokens 8 --num-beams 4 --gamma 2 --draft-widths 4",
    "profile": "--tokens [1,4] --repeats 1",
    "train": "--trainer.max_epochs 1 --trainer.accelerator cpu",
    "simulate": "--prompts all",
    "bench": "--limit 1 --max-new-tokens 3 --methods [transformers,learned] --dtypes [bfloat16]",
}
"""What the test adds to the commands of the README, so that they are quick."""

MAKE_TARGETS = {"make demo": "$(BIN)/beamwise demo", "make test": "$(BIN)/pytest"}
"""Commands that a test cannot run inside itself, and what the Makefile must do for them."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [
    *(block.splitlines() for block in blocks("sh")),
    *([command] for command in re.findall(r"`(beamwise \w+ --[^`]*)`", README)),
]
"""The commands of each block, and those within the text."""


@pytest.mark.parametrize("command", [line for block in COMMANDS for line in block if line.startswith("make ")])
def test_make_targets(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{command.removeprefix('make ')}:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None
    assert MAKE_TARGETS[command] in recipe[1]


def run(command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "beamwise"
    help_alone = " ".join(arguments) if arguments[-1] == "--help" else arguments[0]
    try:
        code = main([*arguments, *ADDED_ARGUMENTS[help_alone].split()])
    except SystemExit as stop:  # --help
        code = int(stop.code or 0)
    assert code == 0, command


@pytest.mark.smollm2
@pytest.mark.parametrize("block", [block for block in COMMANDS if not block[0].startswith("make ")], ids=str)
def test_commands(
    block: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a block one after the other, in one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (example,) = blocks("json")
    more = (ASSETS / "chat_prompts.jsonl").read_text().splitlines() if "collect" in block[0] else []
    (tmp_path / "prompts.jsonl").write_text("\n".join([example, *more[:11]]))
    for command in block:
        run(command)
        if "--out texts.jsonl" in command:
            record = json.loads((tmp_path / "texts.jsonl").read_text())
            assert json.loads(example).items() <= record.items()
            assert {"text", "texts", "scores", "stats"} <= set(record)
            (tmp_path / "texts.jsonl").unlink()
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
