"""The measuring scripts run, at the smallest size, on the real pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from beamwise.benchmarks import paper_table, policies, slots
from beamwise.commands.loading import shipped_controller

pytestmark = pytest.mark.smollm2


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "category": "sums", "prompt": "What is 2 + 3?", "answer": "5"}))
    controller = shipped_controller("smollm2-135m")
    assert controller is not None
    return ["--prompts", str(prompts), "--controller", controller, "--max-new-tokens", "4"]


def run(main: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    main()  # type: ignore[operator]


def test_policies(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-beams", "2", "--fixed", "1x4", "--sampling", "greedy", "--oracle", "--oracle-gamma", "2"]
    run(policies.main, [*arguments, *options], monkeypatch)
    words = capsys.readouterr().out
    assert "| category (prompts) | off, tokens/s | off | fixed 1x4 | learned | oracle |" in words
    assert "| sums (1) |" in words
    assert "share of the gap" in words


def test_paper_table(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(paper_table.main, [*arguments, "--num-beams", "2", "--gamma", "2", "--draft-width", "4"], monkeypatch)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 + 2 * 9 + 1 + 5 + 1
    for name in ("target only, 2 beams", "rejection, exact", "coupled, learned, exact"):
        assert any(row.startswith(f"| {name} |") for row in rows)


def test_slots(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(slots.main, [*arguments[:2], "--num-beams", "4", "--new-tokens", "5"], monkeypatch)
    *_, row, _, summary = capsys.readouterr().out.splitlines()
    category, prompt_tokens, steps, end, average = row.strip("| ").split(" | ")
    assert (category, steps) == ("sums", "4")  # the last step leaves no live beam
    assert int(prompt_tokens) > 10
    assert 1.0 <= float(average) <= float(end) < 4.0
    assert summary == f"1 prompts, at the end: median {end}, quartiles {end} and {end}, max {end}"
