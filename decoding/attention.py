"""Attention of the pool's forwards: grouped queries against one copy of the keys and values.

transformers' ``sdpa`` repeats every key and value head for its query group before it calls the kernel whenever there is
a mask. Folding the group into the query length instead gives the same products without the copies.

A forest's nodes all see the whole trunk. Where that is long, the trunk is attended to apart, without a mask (which lets
a flash kernel run), the tree by plain masked products, and the two are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

GROUPED = "beamwise_grouped"

_SPLIT_FROM = {"cuda": 4096}
"""By kind of device. On the CPU one masked call measured faster up to 4096 slots, and at 16384 splitting gained 5 %
(benchmarks/attention.py), so it is off there. The figure for CUDA is a guess, not a measurement."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' ``AttentionInterface``.

    Args:
        module: the attention layer.
        query: (B, heads, T, head_dim).
        key: (B, kv_heads, S, head_dim).
        value: (B, kv_heads, S, head_dim).
        attention_mask: additive, (B, 1, groups * T, S), as `grouped_mask` makes it. It may be narrower than S: every
            query sees the slots before those that it covers.
        scaling: of the products; None for 1 / sqrt(head_dim).
        dropout: ignored: the pool never trains.
        kwargs: further arguments of the interface; those that change the result are refused.

    Returns:
        Outputs (B, T, heads, head_dim), and None for the weights.

    Raises:
        ValueError: the model asks for soft-capping, sinks or biases, which this kernel does not have.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"grouped attention has no {name}")
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    if attention_mask is not None and attention_mask.shape[3] < key.shape[2]:
        mixed = split_attention(folded, key, value, attention_mask, dim**-0.5 if scaling is None else scaling)
    else:
        mixed = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(batch, heads, length, value.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


def split_threshold(device: torch.device) -> int | None:
    """Trunk slots from which on a pool attends to trunk and tree apart; None never does."""
    return _SPLIT_FROM.get(device.type)


def split_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention to a trunk that every query sees, and to a tree by a mask, merged by log-sum-exp.

    Args:
        query: (B, heads, N, head_dim).
        key: (B, heads, S, head_dim).
        value: (B, heads, S, value_dim).
        mask: additive, (B, 1, N, tree): of the last slots; those before are the trunk.
        scale: of the products.

    Returns:
        (B, heads, N, value_dim), in the dtype of the queries.
    """
    trunk = key.shape[2] - mask.shape[3]
    above, above_weight = _trunk_attention(query, key[:, :, :trunk], value[:, :, :trunk], scale)
    below, below_weight = _masked_attention(query, key[:, :, trunk:], value[:, :, trunk:], mask, scale)
    share = torch.sigmoid(above_weight - below_weight).unsqueeze(-1)  # e^a / (e^a + e^b)
    return torch.lerp(below, above.to(below.dtype), share.to(below.dtype)).to(query.dtype)


def _trunk_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, heads, N, value_dim) and log-sum-exps (B, heads, N), by a flash kernel where there is one."""
    dim = query.shape[3]
    if dim != value.shape[3]:
        return _masked_attention(query, key, value, None, scale)
    if query.device.type == "cpu":
        outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        return outputs[0], outputs[1]
    if query.dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= 256:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
        return outputs[0], outputs[1]
    return _masked_attention(query, key, value, None, scale)


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by plain products, softmax in float32 at least. A query that sees nothing gives zeros and -inf."""
    scores = torch.matmul(query, key.transpose(2, 3))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - log_sum.clamp_min(torch.finfo(scores.dtype).min).unsqueeze(-1))
    return torch.matmul(weights.to(value.dtype), value).to(scores.dtype), log_sum


def grouped_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of `grouped_attention`.

    Args:
        visible: bool (B, 1, T, S).
        groups: query heads per key head.
        dtype: of the model.

    Returns:
        Additive mask (B, 1, groups * T, S).
    """
    additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return additive.masked_fill_(~visible, float("-inf")).repeat(1, 1, groups, 1)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model's forwards inside the block with another registered attention function."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
