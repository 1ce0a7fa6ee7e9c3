"""Traces as training data: splits, batches, ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from beamwise.decoding.errors import ConfigError, FormatError, InputError
from beamwise.decoding.trace import TraceWriter, read_layers
from beamwise.train.data import TraceBatches, TraceData
from beamwise.train.rows import SPLITS, Rows, TraceSource, split_of

from .synthetic import SyntheticWorld

FRACTIONS = (0.15, 0.2)


def source(traces: Path, cache_rows: int = 10**6) -> TraceSource:
    return TraceSource([str(traces)], FRACTIONS, 0, cache_rows)


def ordered(rows: Rows) -> torch.Tensor:
    """The features, in an order that depends on the rows alone."""
    return rows.features[rows.features[:, -1].argsort()]


def test_split_by_prompt_and_complete(traces: Path) -> None:
    src = source(traces)
    reached = sum(int(batch["reached"].true_count) for batch in read_layers(traces, ["reached"]))
    assert sum(src.counts.values()) == reached
    assert {split: len(src.load(split)) for split in SPLITS} == src.counts
    prompts = {split: set() for split in SPLITS}
    for batch in read_layers(traces, ["prompt"]):
        for prompt in batch["prompt"].to_pylist():
            prompts[split_of(prompt, FRACTIONS, 0)].add(prompt)
    assert sum(len(members) for members in prompts.values()) == 300
    assert 0.08 < len(prompts["val"]) / 300 < 0.22
    assert 0.13 < len(prompts["test"]) / 300 < 0.27


def test_a_prompt_stays_in_its_split_whatever_else_is_traced() -> None:
    assert [split_of(f"gsm8k-{n}", FRACTIONS, 0) for n in range(8)] == [
        split_of(f"gsm8k-{n}", FRACTIONS, 0) for n in range(8)
    ]
    assert {split_of("x", FRACTIONS, seed) for seed in range(30)} == set(SPLITS)


def test_features_in_training_are_bitwise_those_of_the_trace(traces: Path) -> None:
    batch = next(read_layers(traces, batch_size=20))
    stored = torch.tensor(batch["features"].to_pylist())
    loaded = torch.cat([source(traces).load(split).features for split in SPLITS])
    for index, reached in enumerate(batch["reached"].to_pylist()):
        assert (loaded == stored[index]).all(1).any() == reached


def test_streaming_gives_the_same_rows_as_the_cache(traces: Path) -> None:
    cached, streamed = source(traces), source(traces, cache_rows=0)
    for split in SPLITS:
        assert torch.equal(ordered(cached.load(split)), ordered(streamed.load(split)))
    epochs = [TraceBatches(streamed, "train", 64, 512, lambda: 0), TraceBatches(cached, "train", 64, 512, lambda: 0)]
    for batches in epochs:
        seen = list(batches)
        assert len(seen) == len(batches) == streamed.counts["train"] // 64
        assert all(len(batch) == 64 for batch in seen)
    assert len(streamed.load("train", most=100)) == 100


def test_epochs_differ_and_repeat(traces: Path) -> None:
    src = source(traces)
    first, again, second = (
        next(iter(TraceBatches(src, "train", 64, 512, lambda epoch=epoch: epoch))) for epoch in (0, 0, 1)
    )
    assert torch.equal(first.features, again.features)
    assert not torch.equal(first.features, second.features)


@pytest.mark.parametrize("shuffle", [None, 512])
def test_ranks_share_the_batches(traces: Path, shuffle: int | None) -> None:
    src = source(traces)
    ranks = [list(TraceBatches(src, "val", 32, shuffle, lambda: 0, rank, 3)) for rank in range(3)]
    lengths = [len(TraceBatches(src, "val", 32, shuffle, lambda: 0, rank, 3)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == lengths
    features = torch.cat([batch.features for batches in ranks for batch in batches])
    assert len(features.unique(dim=0)) == len(features)  # no row twice
    if shuffle is None:
        assert len(features) == src.counts["val"]
    else:
        assert len(set(lengths)) == 1


def test_statistics(traces: Path) -> None:
    src = source(traces)
    mean, std = src.statistics()
    features = src.load("train").features
    torch.testing.assert_close(mean, features.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(std, features.std(0, correction=0), atol=1e-3, rtol=1e-3)


def test_several_folders(traces: Path, tmp_path: Path) -> None:
    SyntheticWorld(seed=3).write(tmp_path, prompts=40, beams=(3,))
    src = TraceSource([str(traces), str(tmp_path)], FRACTIONS, 0, 10**6)
    assert src.beams == {1, 2, 3, 4}
    assert src.max_width == 4


def test_bad_input(tmp_path: Path, traces: Path) -> None:
    with pytest.raises(FormatError, match="holds no traces"):
        source(tmp_path)
    with TraceWriter(tmp_path, "empty", {}):
        pass
    with pytest.raises(FormatError, match="holds no traces"):
        source(tmp_path)
    few = tmp_path / "few"
    SyntheticWorld(seed=1).write(few, prompts=1)
    with pytest.raises(InputError, match="no layers for the"):
        source(few)
    for fractions in ((0.5, 0.5), (0.1, None), (0.1,)):
        with pytest.raises(ConfigError, match="fractions"):
            TraceSource([str(traces)], fractions, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        TraceData(str(traces), batch_size=0)
