"""Trunk and tree attended to apart, against one masked call."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beamwise.decoding.attention import GROUPED, grouped_attention, grouped_mask, split_attention, split_threshold
from beamwise.decoding.causal import CausalModel
from beamwise.decoding.compat import check_model
from beamwise.decoding.config import RunnerName
from beamwise.decoding.forest import Forest
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.kv_pool import KVPool
from tests.conftest import make_tiny_llama
from tests.decoding.test_kv_pool import VOCAB, RandomForest


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 9),
    trunk=st.integers(1, 70),
    groups=st.sampled_from([1, 3]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    value_dim=st.sampled_from([8, 5]),
    seed=st.integers(0, 999),
)
def test_split_attention_is_masked_attention(
    batch: int, queries: int, trunk: int, groups: int, scale: float, value_dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tree = queries + 3
    query, key, value = (
        numbers(batch, 2 * groups, queries, 8),
        numbers(batch, 2, trunk + tree, 8),
        numbers(batch, 2, trunk + tree, value_dim),
    )
    visible = torch.rand(batch, 1, queries, trunk + tree, generator=generator) < 0.5
    visible[..., :trunk] = True
    visible[:, :, 0, trunk:] = False  # a query that sees the trunk alone
    mask = grouped_mask(visible, groups, torch.float64)
    module: Any = None
    whole, _ = grouped_attention(module, query, key, value, mask, scaling=scale)
    apart, _ = grouped_attention(module, query, key, value, mask[..., trunk:], scaling=scale)
    torch.testing.assert_close(apart, whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_narrow_types_is_no_worse(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 16, generator=generator, dtype=torch.float64) for n in (12, 400, 400))
    visible = torch.ones(1, 1, 12, 400, dtype=torch.bool)
    visible[..., 380:] = torch.rand(12, 20, generator=generator) < 0.5
    exact = split_attention(query, key, value, grouped_mask(visible, 1, torch.float64)[..., 380:], 0.25)
    mask = grouped_mask(visible, 1, dtype)
    narrow = [tensor.to(dtype) for tensor in (query, key, value)]
    apart = split_attention(narrow[0], narrow[1], narrow[2], mask[..., 380:], 0.25)
    whole = torch.nn.functional.scaled_dot_product_attention(*narrow, attn_mask=mask, scale=0.25)
    assert apart.dtype == dtype
    assert (apart - exact).abs().max() <= 1.5 * (whole - exact).abs().max()


@pytest.mark.parametrize("runner", ["eager", "buckets"])
def test_pools_that_split_give_the_same_logits(runner: RunnerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of unequal trunks, tokens that join the trunk uncomputed, padded queries: all in random blocks."""
    for module in ("kv_pool", "runner"):
        monkeypatch.setattr(f"beamwise.decoding.{module}.SLOT_BUCKET", 8)
    causal = CausalModel(make_tiny_llama(3, vocab_size=VOCAB))
    check_model(causal)
    assert causal.implementation == GROUPED
    plain, split = KVPool(causal, 2, 4), KVPool(causal, 2, 4, runner=runner)
    split.split_from = 1
    rows = [RandomForest(seed, width=2) for seed in range(2)]
    widths = []
    call = split._call
    split._call = lambda tokens, positions, visible, embeds: (  # type: ignore[method-assign]
        widths.append(visible.shape[2]) or call(tokens, positions, visible, embeds)  # type: ignore[func-returns-value]
    )
    with torch.inference_mode():
        for block in range(120):
            active = [0, 1] if block % 3 else [block % 2]
            for index in active:
                rows[index].draft()
            forests = [rows[index].forest for index in active]
            wanted = [min(plain.pending(i, f), f.size) for i, f in zip(active, forests, strict=True)]
            ours, theirs = split.forward(active, forests, wanted), plain.forward(active, forests, wanted)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
            for index in active:
                rows[index].live = rows[index].extend([rows[index].live[0]] * 2)
                pruning: Any = rows[index].prune()
                plain.prune(index, pruning)
                split.prune(index, pruning)
    trunk = min(row.forest.num_trunk for row in rows)
    assert trunk > 60
    assert min(widths[-10:]) < 40  # the masks cover the tree, not the trunk


def test_a_long_prompt_in_chunks() -> None:
    causal = CausalModel(make_tiny_llama(1, vocab_size=VOCAB))
    causal.model.config.max_position_embeddings = 4096
    check_model(causal)
    prompt = torch.randint(VOCAB, (1300,), generator=torch.Generator().manual_seed(0))
    logits = []
    for split_from in (None, 64):
        forest = Forest(prompt[:-1], torch.device("cpu"))
        forest.add_root(prompt[-1:])
        pool = KVPool(causal, rows=1, capacity=8)
        pool.split_from = split_from
        with torch.inference_mode():
            logits.append(pool.forward([0], [forest], [1])[0])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-9, rtol=1e-9)


def test_whole_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = make_tiny_llama(5, vocab_size=VOCAB), make_tiny_llama(6, vocab_size=VOCAB, layers=1)
    outputs = []
    for threshold in (None, 4):
        monkeypatch.setattr("beamwise.decoding.kv_pool.split_threshold", lambda device, t=threshold: t)
        beams = SpeculativeBeams(draft_model=draft, gamma=2, batch_size=2)
        prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
        outputs.append(cast(Any, target).generate(prompts, num_beams=3, max_new_tokens=40, custom_generate=beams))
    assert outputs[0].tolist() == outputs[1].tolist()


def test_where_it_is_used() -> None:
    assert split_threshold(torch.device("cpu")) is None  # measured slower there
    assert split_threshold(torch.device("cuda")) is not None
    eager = make_tiny_llama(1)
    eager.config._attn_implementation = "eager"
    assert KVPool(CausalModel(eager), 1, 8).split_from is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: its flash kernel cannot be run")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_cuda(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 3, n, 64, device="cuda", dtype=dtype) for n in (12, 512, 512))
    visible = torch.ones(2, 1, 12, 512, dtype=torch.bool, device="cuda")
    visible[..., 480:] = torch.rand(12, 32, device="cuda") < 0.5
    mask = grouped_mask(visible, 1, dtype)
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.125)
    apart = split_attention(query, key, value, mask[..., 480:], 0.125)
    torch.testing.assert_close(apart, whole, atol=2e-2, rtol=2e-2)
