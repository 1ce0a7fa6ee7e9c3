"""Prompts of many kinds: by the seed alone, of all kinds, and readable by `beamwise collect`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from beamwise.benchmarks.prompt_mix import TASKS, mix
from beamwise.decoding.prompts import read_prompts


def test_kinds_and_sources() -> None:
    records = mix(["question"], ["text" * 1000], 300, seed=1)
    assert records == mix(["question"], ["text" * 1000], 300, seed=1)
    assert records != mix(["question"], ["text" * 1000], 300, seed=2)
    assert {record["category"] for record in records} == set(TASKS)
    assert len({record["id"] for record in records}) == 300
    assert sum("text" * 300 in record["prompt"] for record in records) == 100
    assert max(len(record["prompt"]) for record in records) < 1700


def test_command(tmp_path: Path) -> None:
    for name in ("questions", "texts"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"some {name}"}) + "\n")
    out = tmp_path / "mix.jsonl"
    command = [sys.executable, "-m", "beamwise.benchmarks.prompt_mix", "--count", "5", "--out", str(out)]
    command += ["--questions", str(tmp_path / "questions.jsonl"), "--texts", str(tmp_path / "texts.jsonl")]
    subprocess.run(command, check=True)
    assert len(read_prompts(out)) == 5
