"""A causal language model as body and head, with the attention mask of its implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
import torch._dynamo
from transformers import PreTrainedModel

from .attention import GROUPED, attention_implementation, grouped_mask
from .errors import UnsupportedError
from .linear import PackedLinears

_MOST_COMPILED = 512
"""Shapes of one model that are compiled, at most."""


class CausalModel:
    """A Hugging Face causal LM as body and head, so that logits are computed only where they are wanted.

    Args:
        model: any decoder-only causal LM; its numerics are its own (dtype, device, attention kernel).
        pack_weights: keep a copy of its linear layers' weights in the order that the CPU reads them (see `linear`).

    Raises:
        UnsupportedError: the attention implementation cannot take an explicit mask.
    """

    def __init__(self, model: PreTrainedModel, pack_weights: bool = True) -> None:
        self.model = model
        self.device = model.device
        self.implementation = str(getattr(model.config, "_attn_implementation", "sdpa"))
        if self.implementation not in ("sdpa", "eager"):
            raise UnsupportedError(
                f"attention implementation '{self.implementation}' takes no tree mask: "
                "load the model with attn_implementation='sdpa' (or 'eager')"
            )
        config = model.config.get_text_config()
        heads = int(config.num_attention_heads)
        self._groups = heads // int(getattr(config, "num_key_value_heads", None) or heads)
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = int(config.vocab_size)
        self._output_embeddings: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._linears = PackedLinears(model, pack_weights)
        head = self._output_embeddings
        self._head_linears = PackedLinears(torch.nn.Identity() if head is None else head, pack_weights)
        body = model.base_model
        self._body = body if body is not model and self._splits(body) else None

    @torch.no_grad()
    def _splits(self, body: torch.nn.Module) -> bool:
        """Whether head(body(x)) is the model's own output: not where logits are scaled or soft-capped."""
        head = self._output_embeddings
        if head is None:
            return False
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        ours = head(body(input_ids=token, use_cache=False).last_hidden_state)
        return bool(torch.equal(ours, self.model(input_ids=token, use_cache=False).logits))

    def refresh(self) -> None:
        """Notice weights that were changed since the last call."""
        self._linears.refresh()
        self._head_linears.refresh()

    def hidden(self, compiled: bool = False, **inputs: Any) -> torch.Tensor:
        """Last hidden states, (B, T, hidden); the logits themselves where body and head cannot be told apart.

        Args:
            compiled: run code that is compiled for the inputs' shapes.
            inputs: of the model's forward.
        """
        with attention_implementation(self.model, self.implementation):
            if compiled:
                with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED, accumulated_recompile_limit=1 << 16):
                    output = self._compiled(**inputs)
            else:
                with self._linears.in_use():
                    output = (self._body or self.model)(**inputs)
        return cast(torch.Tensor, output.logits if self._body is None else output.last_hidden_state)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        return torch.compile(self._body or self.model, dynamic=False)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of hidden states (..., hidden)."""
        if self._body is None:
            return hidden
        assert self._output_embeddings is not None
        with self._head_linears.in_use():
            return cast(torch.Tensor, self._output_embeddings(hidden))

    def mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The attention mask of this implementation, from bool (B, 1, T, S)."""
        if self.implementation == GROUPED:
            return grouped_mask(visible, self._groups, self.model.dtype)
        if self.implementation == "sdpa":
            return visible
        additive = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
        return additive.masked_fill_(~visible, torch.finfo(self.model.dtype).min)
