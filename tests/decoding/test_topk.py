"""The largest of many numbers, as torch.topk gives them."""

from __future__ import annotations

import pytest
import torch

from beamwise.decoding.topk import topk_rows


@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(1, 49_152, 1), (3, 32_768, 16), (2, 50_257, 7), (1, 200_000, 64), (2, 100, 5)]
)
def test_equals_torch(rows: int, columns: int, count: int) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    values[:, -1] = 9.0  # the largest in the last, incomplete chunk
    values[0, : columns // 2] = float("-inf")
    expected = torch.topk(values, count, dim=1)
    found, index = topk_rows(values, count)
    assert torch.equal(found, expected.values)
    assert torch.equal(index, expected.indices)


def test_equal_numbers() -> None:
    """As many as there are come out, each once."""
    values = torch.zeros(2, 40_000)
    values[0, ::1000] = 1.0
    found, index = topk_rows(values, 16)
    assert torch.equal(found, torch.tensor([[1.0] * 16, [0.0] * 16]))
    assert torch.equal(values.gather(1, index), found)
    assert all(len(set(row)) == 16 for row in index.tolist())


def test_nan_comes_first() -> None:
    values = torch.zeros(1, 40_000)
    values[0, 31_000] = float("nan")
    found, index = topk_rows(values, 2)
    assert found.isnan().tolist() == [[True, False]]
    assert int(index[0, 0]) == 31_000
