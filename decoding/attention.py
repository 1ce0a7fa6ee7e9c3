"""Attention of the pool's forwards: grouped queries against one copy of the keys and values.

transformers' ``sdpa`` repeats every key and value head for its query group before it calls the kernel whenever there is
a mask. Folding the group into the query length instead gives the same products without the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

GROUPED = "beamwise_grouped"


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
        attention_mask: additive, (B, 1, groups * T, S), as `grouped_mask` makes it.
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
    mixed = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(batch, heads, length, value.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


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
