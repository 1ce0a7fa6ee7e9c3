"""Traces as training data: splits, batches, ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from beamwise.decoding.errors import ConfigError, FormatError, InputError
from beamwise.decoding.trace import TraceWriter, read_layers
from beamwise.train.data import ResumableLoader, TraceBatches, TraceData
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
    for src in (streamed, cached):
        batches = TraceBatches(src, "train", 64, 512, lambda: 0)
        seen = list(batches)
        assert len(seen) == len(batches) == -(-src.counts["train"] // 64)
        assert max(map(len, seen)) <= 64
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
        assert torch.equal(ordered(Rows.cat(seen)), ordered(src.load("train")))
    assert len(streamed.load("train", most=100)) == 100


def test_epochs_differ_and_repeat(traces: Path) -> None:
    src = source(traces)
    first, again, second = (
        next(iter(TraceBatches(src, "train", 64, 512, lambda epoch=epoch: epoch))) for epoch in (0, 0, 1)
    )
    assert torch.equal(first.features, again.features)
    assert not torch.equal(first.features, second.features)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of very different sizes."""
    folder = tmp_path_factory.mktemp("uneven")
    world = SyntheticWorld(seed=5)
    for part, (prompts, blocks) in enumerate([(40, 2), (18, 30), (3, 1)]):
        world.write(folder / str(part), prompts, blocks)
    return folder


def uneven_source(folder: Path) -> TraceSource:
    return TraceSource([str(folder / str(part)) for part in range(3)], FRACTIONS, 0, cache_rows=0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [None, 100])
def test_every_row_once_over_processes_and_workers(uneven: Path, shuffle: int | None, world: int, workers: int) -> None:
    src = uneven_source(uneven)
    ranks = []
    for rank in range(world):
        loader = ResumableLoader(TraceBatches(src, "train", 16, shuffle, lambda: 1, rank, world), workers)
        ranks.append(list(loader))
        assert len(loader) == len(ranks[-1]) == len(ranks[0])
    features = torch.cat([batch.features for batches in ranks for batch in batches])
    assert torch.equal(ordered(Rows(features, *[features] * 3)), ordered(src.load("train")))
    steps = list(TraceBatches(src, "train", 16 * world, shuffle, lambda: 1))  # one process, as many rows per step
    for number, step in enumerate(steps):
        assert torch.equal(step.features, torch.cat([batches[number].features for batches in ranks]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(uneven: Path, workers: int) -> None:
    src = uneven_source(uneven)

    def loader() -> ResumableLoader:
        return ResumableLoader(TraceBatches(src, "train", 16, 100, lambda: 2), workers)

    whole, resumed, first = list(loader()), loader(), loader()
    running = iter(first)
    for _ in range(7):
        next(running)
    resumed.load_state_dict(first.state_dict())
    rest = list(resumed)
    assert [batch.features.sum() for batch in rest] == [batch.features.sum() for batch in whole[7:]]
    assert resumed.state_dict() == {"given": len(whole), "batches": len(whole)}
    assert len(list(resumed)) == len(whole)  # the next epoch is whole again
    with pytest.raises(ConfigError, match="rows per step"):
        ResumableLoader(TraceBatches(src, "train", 8, 100, lambda: 0)).load_state_dict(first.state_dict())


def test_rows_held_do_not_grow_with_the_traces(tmp_path: Path) -> None:
    held = []
    for prompts in (40, 160):
        SyntheticWorld(seed=7).write(tmp_path / str(prompts), prompts)
        src = source(tmp_path / str(prompts), cache_rows=0)
        batches = TraceBatches(src, "train", 16, 100, lambda: 0)
        assert sum(map(len, batches)) == src.counts["train"]
        largest = max(len(chunk) for chunk in src.chunks("train"))
        held.append((src.counts["train"], batches.held, 100 + largest))
    assert held[1][0] > 3 * held[0][0]
    assert all(most <= bound for _, most, bound in held)


def test_more_processes_than_rows(uneven: Path) -> None:
    src = uneven_source(uneven)
    with pytest.raises(InputError, match="use fewer processes"):
        TraceBatches(src, "val", 1, None, lambda: 0, 0, src.counts["val"] + 1)
    tight = [TraceBatches(src, "val", 1, None, lambda: 0, rank, 3) for rank in range(3)]
    assert sum(len(batch) for batches in tight for batch in batches) == src.counts["val"]


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
