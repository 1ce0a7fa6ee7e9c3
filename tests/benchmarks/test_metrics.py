"""Figures of a benchmark: bootstrap intervals, paired ratios, memory, sums."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
import torch

from beamwise.benchmarks.metrics import (
    SCHEMA,
    PeakMemory,
    Row,
    acceptance_cells,
    can_measure_energy,
    mark_identical,
    median_interval,
    paired_ratios,
    slot_bytes,
    summarise,
)
from tests.conftest import make_tiny_llama


def make_row(prompt: str, seconds: float, **changes: object) -> Row:
    row = Row(
        setting="s",
        num_beams=2,
        do_sample=False,
        dtype="float32",
        device="cpu",
        method="m",
        exact=True,
        source="p",
        category="c",
        prompt=prompt,
        prompt_tokens=3,
        turn=0,
        seconds=seconds,
        positions=10,
        new_tokens=8,
        target_forwards=5,
        draft_forwards=4,
        widths=20,
        drafted_nodes=9,
        target_tokens=30,
        peak_slots=12,
        kv_bytes=1200,
        peak_bytes=None,
        draft_s=0.1 * seconds,
        target_s=0.6 * seconds,
        energy_j=None,
        tokens=[1, 2],
        text="one",
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def test_rows_fit_the_schema() -> None:
    assert SCHEMA.names == [item.name for item in dataclasses.fields(Row)]
    record = dataclasses.asdict(make_row("a", 1.0, cells=[[0, 2, 5, 3]]))
    assert pa.Table.from_pylist([record], schema=SCHEMA).to_pylist() == [record]


def test_ratios_are_paired_by_prompt() -> None:
    base = [make_row("a", 2.0), make_row("b", 4.0)]
    assert paired_ratios([make_row("b", 1.0), make_row("a", 1.0), make_row("z", 1.0)], base) == [4.0, 2.0]


def test_the_interval_of_a_median() -> None:
    assert median_interval([1.5] * 9) == (1.5, 1.5, 1.5)
    median, low, high = median_interval([float(value) for value in range(1, 100)])
    assert median == 50.0
    assert 35 < low < 50 < high < 65  # a rank interval of 99 values: about +-10 ranks
    assert median_interval([1.0, 2.0, 4.0]) == median_interval([1.0, 2.0, 4.0])  # seeded


def test_the_interval_covers_the_true_median() -> None:
    """95 % intervals of 40 normal draws hold their median in about 95 % of the cases."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(200, 40, generator=generator).tolist()
    held = sum(low <= 0.0 <= high for _, low, high in map(median_interval, draws))
    assert 0.89 <= held / 200 <= 0.99


def test_summary() -> None:
    rows = [make_row("a", 1.0, log_likelihood=-1.0, f1=0.5, identical=True), make_row("b", 3.0, log_likelihood=-2.0)]
    figures = summarise(rows, [make_row("a", 2.0), make_row("b", 3.0)])
    assert figures["tokens_per_second"] == pytest.approx(20 / 4)
    assert figures["text_tokens_per_second"] == pytest.approx(16 / 4)
    assert figures["ratio"][0] == pytest.approx(1.5)
    assert figures["mean_acceptance_length"] == pytest.approx(2.0)
    assert figures["mean_width"] == pytest.approx(2.0)
    assert figures["share_target"] == pytest.approx(0.6)
    assert figures["share_rest"] == pytest.approx(0.3)
    assert figures["log_likelihood"] == pytest.approx(-1.5)
    assert figures["f1"] == pytest.approx(0.5)
    assert figures["identical"] == [1, 1]
    for name in ("number_correct", "joules_per_token", "peak_bytes"):
        assert figures[name] is None  # not measured is not zero


def test_one_prompt_without_a_clock_leaves_the_shares_unknown() -> None:
    rows = [make_row("a", 1.0), make_row("b", 1.0, draft_s=None, target_s=None)]
    assert summarise(rows, [])["share_target"] is None
    assert summarise(rows, [])["ratio"] is None


def test_acceptance_adds_up() -> None:
    rows = [make_row("a", 1.0, cells=[[0, 2, 5, 3], [1, 2, 3, 1]]), make_row("b", 1.0, cells=[[0, 2, 1, 1]])]
    assert acceptance_cells(rows) == {(0, 2): (6, 4), (1, 2): (3, 1)}


def test_identical_is_said_only_where_it_is_due() -> None:
    rows = [make_row("a", 1.0), make_row("b", 1.0), make_row("c", 1.0), make_row("a", 1.0, exact=False)]
    mark_identical(rows, {("s", "p", "a"): [1, 2], ("s", "p", "b"): [1, 3]})
    assert [row.identical for row in rows] == [True, False, None, None]


def test_slot_bytes() -> None:
    assert slot_bytes(make_tiny_llama()) == 2 * 2 * 2 * 4 * 8  # key and value, layers, kv heads, head size, float64


def test_peak_memory_notices_an_allocation() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    before = memory.read()
    if before is None:
        pytest.skip("this system does not tell a process's peak memory")
    block = torch.ones(8 * 2**20)  # 32 MiB, touched
    after = memory.read()
    assert after is not None
    assert after >= before
    assert block.sum() > 0


def test_energy_is_not_guessed() -> None:
    assert not can_measure_energy(torch.device("cpu"))
