"""The transposed product: the same numbers, and the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from beamwise.decoding.linear import swappable_linears, transposed_linear, transposed_linears
from tests.conftest import make_tiny_llama


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 12), (2, 12), (1, 7, 12), (2, 3, 12), (1, 80, 12)])
def test_the_product_is_the_same(shape: tuple[int, ...], bias: bool) -> None:
    module = torch.nn.Linear(12, 20, bias=bias)
    rows = torch.randn(shape)
    ours = transposed_linear(module, rows)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, module(rows), atol=1e-6, rtol=1e-6)


def test_only_inside_the_block_and_only_float32() -> None:
    model = make_tiny_llama(0, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits
    linears = swappable_linears(model)
    assert len(linears) == 2 * 7 + 1
    with transposed_linears(linears):
        assert swappable_linears(model) == []  # no layer twice
        torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
    assert not any("forward" in vars(module) for module in linears)
    assert torch.equal(model(ids).logits, before)
    assert swappable_linears(make_tiny_llama(0, dtype=torch.float64)) == []
    assert swappable_linears(make_tiny_llama(0, dtype=torch.bfloat16)) == []
