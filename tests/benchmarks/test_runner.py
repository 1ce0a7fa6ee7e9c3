"""The measuring: rotation, exactness, skipped methods, continuation after an interruption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from beamwise.benchmarks import runner
from beamwise.benchmarks.methods import NAMES, make_methods
from beamwise.benchmarks.runner import Part
from beamwise.benchmarks.settings import parse_shape
from beamwise.cli import main
from beamwise.commands.bench import BenchOptions, bench, make_plan, select_prompts
from beamwise.commands.loading import shipped_controller
from beamwise.decoding.errors import ConfigError, FormatError
from tests.benchmarks.tiny_bench import make_options

Make = Callable[..., LlamaForCausalLM]


def rows_of(options: BenchOptions) -> list[runner.Row]:
    return Part.load(Path(options.out) / "results.parquet").rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Make) -> BenchOptions:
    options = make_options(
        tmp_path_factory.mktemp("bench"),
        tiny_llama,
        methods=["transformers", "assisted", "target_only", "fixed", "paper", "rejection", "learned", "oracle"],
        shapes=["2xauto", "1x3"],
    )
    bench(options)
    return options


def test_a_row_for_every_prompt_and_method(finished: BenchOptions) -> None:
    rows = rows_of(finished)
    counts = Counter((row.setting, row.method) for row in rows)
    assert set(counts.values()) == {4}
    assert {setting for setting, _ in counts} == {
        f"W={beams} {kind} float32 cpu" for beams in (1, 2) for kind in ("greedy", "sampling")
    }
    for row in rows:
        assert row.seconds > 0
        assert 0 < row.new_tokens <= row.positions <= 6 + (row.method == "transformers")
        assert row.log_likelihood is not None
        assert row.log_likelihood < 0
        assert (row.number_correct is not None) == (row.category == "gsm8k")
        assert (row.f1 is not None) == (row.category == "context_qa")


def test_every_method_takes_every_turn(finished: BenchOptions) -> None:
    rows = [row for row in rows_of(finished) if row.setting == "W=2 greedy float32 cpu"]
    by_prompt = [[row.method for row in rows if row.prompt == name] for name in "abcd"]
    assert len({order[0] for order in by_prompt}) == 4
    assert len({frozenset(order) for order in by_prompt}) == 1
    assert [row.turn for row in rows] == [*range(len(by_prompt[0]))] * 4


def test_exact_methods_say_the_same_in_float32(finished: BenchOptions) -> None:
    rows = rows_of(finished)
    exact = [row for row in rows if row.identical is not None]
    assert {row.method for row in exact if not row.do_sample} == {
        "transformers",
        "transformers, assisted by lookup",
        "transformers, assisted by draft",
        "target only",
        "fixed 2xauto",
        "fixed 1x3",
    }
    assert {row.method for row in exact if row.do_sample} == {"target only", "fixed 2xauto", "fixed 1x3"}
    assert all(row.identical for row in exact)


def test_counters(finished: BenchOptions) -> None:
    for row in rows_of(finished):
        if row.method in ("transformers", "target only"):
            assert row.target_forwards == row.positions
            assert row.draft_forwards == 0
            assert row.cells == []
        if row.method == "transformers":
            assert row.peak_slots == row.num_beams * (row.prompt_tokens + row.positions - 1)
        if row.method.startswith("fixed"):
            assert row.draft_forwards > 0
            assert {width for _, width, _, _ in row.cells} <= {row.num_beams}
            assert all(0 <= covered <= reached for _, _, reached, covered in row.cells)
        if row.method == "transformers, assisted by draft":
            assert row.draft_forwards > 0


def test_what_cannot_run_says_why(finished: BenchOptions) -> None:
    summary = json.loads((Path(finished.out) / "summary.json").read_text())
    skipped = {entry["name"]: entry["skipped"] for entry in summary["settings"]}
    assert "one beam" in skipped["W=2 greedy float32 cpu"]["transformers, assisted by lookup"]
    assert "no controller" in skipped["W=1 sampling float32 cpu"]["learned"]
    assert "no controller" in skipped["W=1 sampling float32 cpu"]["oracle"]
    assert "sampling" in skipped["W=1 greedy float32 cpu"]["paper's rule 1x3, rejection"]
    assert "paper's rule 1x3, rejection" not in skipped["W=1 sampling float32 cpu"]


def test_an_interrupted_run_goes_on(tmp_path: Path, tiny_llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    options = make_options(tmp_path, tiny_llama, methods=["transformers", "target_only"], num_beams=[2])
    measure, calls = runner._measure, [0]

    def counting(*arguments: Any) -> runner.Row:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(runner, "_measure", counting)
    with pytest.raises(KeyboardInterrupt):
        bench(options)
    assert not (tmp_path / "out" / "summary.json").exists()
    first = Part.load(tmp_path / "out" / "parts" / "W2_greedy_float32_cpu.parquet").rows
    assert len(first) == 4  # two prompts, both methods
    bench(options)
    assert calls[0] == 6 + 16 - 4
    rows = rows_of(options)
    assert len(rows) == 16
    assert [row.seconds for row in rows[:4]] == [row.seconds for row in first]
    bench(options)  # all is there: nothing is decoded again
    assert calls[0] == 6 + 16 - 4


def test_another_runs_folder_is_refused(tmp_path: Path, tiny_llama: Make) -> None:
    options = make_options(tmp_path, tiny_llama, methods=["transformers"], num_beams=[1], sampling="greedy")
    bench(options)
    options.max_new_tokens = 5
    with pytest.raises(ConfigError, match=r"other max_new_tokens"):
        bench(options)
    options.max_new_tokens, options.limit = 6, 2  # other prompts
    with pytest.raises(ConfigError, match=r"other prompts"):
        bench(options)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    options.out = str(other)
    with pytest.raises(ConfigError, match="not empty"):
        bench(options)


def test_damaged_parts_are_refused(tmp_path: Path, tiny_llama: Make) -> None:
    options = make_options(tmp_path, tiny_llama, methods=["transformers"], num_beams=[1], sampling="greedy")
    bench(options)
    (tmp_path / "out" / "parts" / "W1_greedy_float32_cpu.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match="cannot be read as results"):
        bench(options)


@pytest.mark.parametrize(
    ("choice", "ids"),
    [("p.jsonl", "abcd"), ("p.jsonl@2", "ab"), ("p.jsonl@1/category", "abc")],
)
def test_prompts_are_chosen(tmp_path: Path, tiny_llama: Make, choice: str, ids: str) -> None:
    chosen = select_prompts(make_options(tmp_path, tiny_llama, prompts=[choice]))
    assert "".join(one.prompt.id for one in chosen) == ids
    assert {one.source for one in chosen} == {"p"}


def test_without_prompts_the_shipped_ones_are_taken() -> None:
    assert len(select_prompts(BenchOptions())) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ["p.jsonl@x"]}, "FILE@20"),
        ({"prompts": ["p.jsonl@0"]}, "FILE@20"),
        ({"prompts": ["p.jsonl", "p.jsonl"]}, "named twice"),
        ({"methods": ["beam"]}, "take methods from"),
        ({"shapes": ["2,8"]}, "GAMMAxM"),
        ({"baseline": "learned"}, "none of the methods"),
    ],
)
def test_bad_choices(tmp_path: Path, tiny_llama: Make, changes: dict[str, Any], words: str) -> None:
    options = make_options(tmp_path, tiny_llama, methods=changes.pop("methods", ["transformers"]), **changes)
    with pytest.raises(ConfigError, match=words):
        make_plan(options, select_prompts(options))


@pytest.mark.parametrize(
    "changes",
    [{"num_beams": []}, {"num_beams": [2, 2]}, {"num_beams": [0]}, {"threshold": 1.0}, {"limit": -1}, {"min_width": 0}],
)
def test_bad_options(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchOptions(**changes)


def test_shapes() -> None:
    assert parse_shape("2x8", 4) == (2, 8)
    assert parse_shape("1xauto", 4) == (1, 8)
    assert len(make_methods(NAMES, ["1x8", "2x8"])) == 1 + 2 + 1 + 3 * 2 + 3


def test_the_shipped_configuration_is_valid(tmp_path: Path, tiny_llama: Make) -> None:
    """configs/bench.yaml, with everything costly overridden."""
    options = make_options(tmp_path, tiny_llama)
    config = Path(__file__).parent.parent.parent / "configs" / "bench.yaml"
    arguments = ["bench", "--config", str(config), "--data", options.data, "--prompts", '["p.jsonl@1"]']
    arguments += ["--target", options.target, "--draft", options.draft, "--out", options.out, "--num-beams", "[2]"]
    arguments += ["--dtypes", '["float32"]', "--max-new-tokens", "3", "--sampling", "greedy", "--devices", '["cpu"]']
    assert main(arguments) == 0
    assert {row.method for row in rows_of(options)} >= {"transformers", "target only"}


@pytest.mark.smollm2
def test_the_controllers_methods_on_the_real_pair(tmp_path: Path) -> None:
    assert shipped_controller("smollm2-135m") is not None
    options = BenchOptions(
        out=str(tmp_path / "out"),
        limit=1,
        num_beams=[2, 9],  # the controller knows up to 8
        sampling="greedy",
        methods=["transformers", "target_only", "learned", "dynamic", "oracle"],
        max_new_tokens=4,
        dtypes=["float32"],
    )
    bench(options)
    rows = {(row.num_beams, row.method): row for row in rows_of(options)}
    assert {method for beams, method in rows if beams == 2} >= {"learned", "learned widths", "oracle"}
    assert (9, "learned") not in rows
    assert rows[2, "learned"].identical
    assert rows[2, "oracle"].identical
