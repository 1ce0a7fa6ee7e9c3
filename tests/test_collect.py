"""`beamwise collect`: a run that was cut off and continued equals an uninterrupted one; logging changes no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from beamwise.cli import main
from beamwise.commands.collect import CollectOptions
from beamwise.commands.collector import Collector
from beamwise.commands.loading import Models
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.models import load_model
from beamwise.decoding.trace_log import TraceLog
from beamwise.decoding.widths import FixedWidth, LayerPlan, LayerView
from tests.conftest import make_tiny_llama
from tests.fuzz.kills import rows
from tests.tiny_folder import WORDS, save_tiny_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_folder(tmp_path_factory.mktemp("target"), make_tiny_llama(0, vocab_size=40, scale=0.5))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"id": f"p{n}", "prompt": f"{WORDS[n % 13]} {WORDS[n % 5]} {WORDS[n % 13]} {WORDS[n % 5]}"} for n in range(10)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def arguments(target: str, prompts: str, out: Path) -> list[str]:
    options = {"prompts": prompts, "out": str(out), "target": target, "drafter": "lookup", "device": "cpu"}
    options |= {"max-new-tokens": "12", "gamma": "3", "draft-widths": "[2,6]", "dtype": "float32", "num-beams": "[1,3]"}
    flat = [text for name, value in options.items() for text in (f"--{name}", value)]
    return ["collect", *flat, "--prompts-per-shard", "3"]


def test_a_run_cut_off_and_continued_equals_a_whole_one(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(target, prompts, tmp_path / "whole")) == 0
    whole = rows(tmp_path / "whole")
    assert {row["prompt"] for row in whole["blocks"]} == {f"p{n}" for n in range(10)}
    assert len(whole["layers"]) > 20
    decode = Collector.decode
    for cut_at in (2, 5, 7):

        def dies(self: Collector, index: int, prompt: Any, cut_at: int = cut_at) -> Any:
            if index == cut_at:
                raise RuntimeError("killed")
            return decode(self, index, prompt)

        monkeypatch.setattr(Collector, "decode", dies)
        with pytest.raises(RuntimeError, match="killed"):
            main(arguments(target, prompts, tmp_path / "cut"))
    monkeypatch.setattr(Collector, "decode", decode)
    assert main(arguments(target, prompts, tmp_path / "cut")) == 0
    assert rows(tmp_path / "cut") == whole


def test_other_settings_do_not_mix_into_a_folder(
    target: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(target, prompts, tmp_path)) == 0
    assert main([*arguments(target, prompts, tmp_path), "--seed", "5"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_logging_changes_no_output_and_logs_what_happened(target: str) -> None:
    model, tokenizer = load_model(target, device="cpu")
    ids = tokenizer("the cat sees the cat sees", return_tensors="pt")
    for do_sample in (False, True):
        options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 20, "do_sample": do_sample, "eos_token_id": None}
        log = TraceLog()
        logged = SpeculativeBeams(policy=FixedWidth(3, 5), drafter="lookup", seed=3, observer=log, measure=True)
        plain = SpeculativeBeams(policy=FixedWidth(3, 5), drafter="lookup", seed=3)
        outputs = [model.generate(**ids, **options, custom_generate=beams) for beams in (logged, plain)]
        assert torch.equal(*outputs)
        assert sum(row.layers for row in log.block_rows) == logged.stats.layers == 20
        assert len(log.block_rows) == logged.stats.target_forwards
        assert sum(row.draft_forwards for row in log.block_rows) == logged.stats.draft_forwards
        assert sum(row.target_tokens for row in log.block_rows) == logged.stats.target_tokens
        for block in log.block_rows:
            layers = [row for row in log.layer_rows if row.block == block.block]
            covered = sum(row.covered for row in layers)
            assert block.layers in (covered + 1, covered)  # the search may end inside the forest
            for row in layers:
                assert row.reached == (row.layer <= covered)
                if row.reached:
                    assert row.covered == (row.candidates_needed[-1] > 0)
                    needed = [count for count in row.candidates_needed if count]
                    assert do_sample or needed == sorted(needed)  # greedy: a narrower step selects a subset


def test_features_are_the_same_online_and_in_the_trace_and_blind_to_the_draw(target: str, tmp_path: Path) -> None:
    """What the policy saw is what was logged; and another seed of the layer's noise changes no feature of the layer."""
    model, tokenizer = load_model(target, device="cpu")
    ids = tokenizer("the cat sees the cat sees", return_tensors="pt")
    seen: list[torch.Tensor] = []

    class Watching:
        def start_block(self, num_beams: int) -> Any:
            return self

        def next_layer(self, view: LayerView) -> LayerPlan | None:
            if view.layer == 2:
                return None
            assert torch.equal(view.features[: len(CONTEXT_NAMES)], view.context_features)
            seen.append(view.features)
            return LayerPlan(3, 4)

    def first_layer(seed: int) -> tuple[torch.Tensor, list[Any]]:
        seen.clear()
        log = TraceLog()
        beams = SpeculativeBeams(policy=Watching(), drafter="model", draft_model=model, seed=seed, observer=log)
        options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "do_sample": True, "eos_token_id": None}
        model.generate(**ids, **options, custom_generate=beams)
        logged = [row.features for row in log.layer_rows]
        assert len(logged) <= len(seen)
        for features in logged:
            assert any(torch.equal(features, other) for other in seen)
        return seen[0], log.layer_rows

    one, rows_one = first_layer(1)
    other, rows_other = first_layer(2)
    assert one.shape == (len(FEATURE_NAMES),)
    assert torch.equal(
        one, other
    )  # at the first layer nothing was drawn yet: the seeds differ in this layer's noise alone
    assert [row.candidates_needed for row in rows_one] != [row.candidates_needed for row in rows_other]


def test_a_collector_depends_on_the_prompts_index_alone(target: str, prompts: str, tmp_path: Path) -> None:
    from beamwise.decoding.prompts import read_prompts

    model, tokenizer = load_model(target, device="cpu")
    options = CollectOptions(prompts=prompts, out=str(tmp_path), drafter="lookup", num_beams=[2], max_new_tokens=10)
    texts = read_prompts(prompts)
    forwards = [_log(model, tokenizer, options, texts, order) for order in ([0, 1, 2, 3], [3, 1])]
    assert forwards[0][3] == forwards[1][3]
    assert forwards[0][1] == forwards[1][1]


def _log(model: Any, tokenizer: Any, options: CollectOptions, texts: Any, order: list[int]) -> dict[int, Any]:
    collector = Collector(Models(model, tokenizer, None), options)
    return {
        index: [
            (row.layer, row.draft_width, list(row.candidates_needed))
            for row in collector.decode(index, texts[index]).layer_rows
        ]
        for index in order
    }


def test_rejection_traces_carry_the_papers_probabilities(target: str, prompts: str, tmp_path: Path) -> None:
    """One per width, decreasing; the candidates needed grow with the width, and covered layers need all beams."""
    options = [*arguments(target, prompts, tmp_path / "traces"), "--verification", "rejection"]
    assert main(options) == 2  # greedy prompts are among them
    assert main([*options, "--sampling", "sample"]) == 0
    found = [row for row in rows(tmp_path / "traces")["layers"] if row["reached"]]
    assert found
    for row in found:
        chances, needed = row["accept_prob"], row["candidates_needed"]
        assert len(chances) == len(needed) == row["num_beams"]
        assert chances == sorted(chances, reverse=True)
        assert 0.0 <= chances[-1] <= chances[0] <= 1.0 + 1e-6
        filled = [count for count in needed if count]
        assert filled == sorted(set(filled))
        assert row["covered"] == (needed[-1] > 0)
