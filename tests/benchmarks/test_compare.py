"""Comparison of two benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from beamwise.benchmarks.compare import compare
from beamwise.benchmarks.runner import Part
from beamwise.cli import main
from beamwise.commands.bench import bench
from beamwise.decoding.errors import ConfigError, FormatError
from tests.benchmarks.tiny_bench import make_options

Make = Callable[..., LlamaForCausalLM]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Make) -> dict[str, str]:
    base = tmp_path_factory.mktemp("compare")
    shared = {"sampling": "greedy", "num_beams": [2]}
    kinds: dict[str, dict[str, object]] = {
        "a": {"methods": ["transformers", "target_only"]},
        "b": {"methods": ["transformers", "fixed"], "seed": 1},
        "shorter": {"methods": ["transformers"], "max_new_tokens": 5},
        "fewer": {"methods": ["transformers"], "limit": 2},
        "other": {"methods": ["target_only"], "baseline": "target only"},
    }
    for name, changes in kinds.items():
        bench(make_options(base, tiny_llama, **{**shared, **changes, "out": str(base / name)}))
    return {name: str(base / name) for name in kinds}


def test_what_both_have_is_compared(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", folders["a"], folders["b"]]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("| W=")]
    assert len(lines) == 1
    assert lines[0].startswith("| W=2 greedy float32 cpu | transformers | 4 |")
    assert "4 of 4" in lines[0]  # greedy: the same texts
    assert "2 pairs" in text  # target only, fixed
    assert "seed 0 and 1" in text


def test_ratios_are_the_second_over_the_first(folders: dict[str, str], tmp_path: Path) -> None:
    """Twice the seconds give half the ratio, whatever they are."""
    path = tmp_path / "slow"
    path.mkdir()
    part = Part.load(Path(folders["a"]) / "results.parquet")
    for row in part.rows:
        row.seconds *= 2
    part.save(path / "results.parquet")
    (path / "summary.json").write_text((Path(folders["a"]) / "summary.json").read_text())
    assert compare(folders["a"], path).count("| 0.50 [0.50, 0.50] |") == 2
    assert compare(path, folders["a"]).count("| 2.00 [2.00, 2.00] |") == 2


@pytest.mark.parametrize(("second", "words"), [("shorter", "max_new_tokens differ"), ("fewer", "prompts differ")])
def test_folders_that_do_not_match_are_refused(folders: dict[str, str], second: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compare(folders["a"], folders[second])


def test_nothing_in_common(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no setting and method in common"):
        compare(folders["b"], folders["other"])


def test_foreign_folders(folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FormatError, match="no finished benchmark"):
        compare(folders["a"], tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(FormatError, match="not a benchmark's"):
        compare(tmp_path, folders["a"])
    assert main(["bench", "compare", folders["a"]]) == 2
    assert main(["bench", "compare", folders["a"], str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
