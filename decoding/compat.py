"""Which models Beamwise decodes. What it cannot decode exactly it refuses, by name, before the first token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import GROUPED
from .causal import CausalModel
from .errors import NumericalError, UnsupportedError
from .forest import Forest
from .kv_pool import KVPool

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest relative difference that rounding explains; a mask or position that is ignored costs far more."""


def check_model(model: CausalModel) -> None:
    """Choose the attention kernel, and refuse models whose forward does not follow a tree mask and positions.

    Static facts of the configuration come first. Then one small forest, two branches above a trunk, is computed in one
    forward and compared with plain forwards of its sequences.

    Raises:
        UnsupportedError: naming the model and what is not supported.
        NumericalError: its logits are NaN.
    """
    hf_model, name = model.model, type(model.model).__name__
    check_kind(hf_model)
    if model.implementation == "sdpa" and getattr(hf_model, "_supports_attention_backend", False):
        model.implementation = GROUPED
        try:
            _compare_with_plain_forward(model, name)
            return
        except UnsupportedError:  # soft-capped or otherwise special attention: the model's own kernel may do
            model.implementation = "sdpa"
    _compare_with_plain_forward(model, name)


def check_kind(hf_model: PreTrainedModel) -> None:
    """Refuse kinds of models that no mask makes decodable, by their configuration alone.

    Raises:
        UnsupportedError: naming the model and what is not supported.
    """
    config, name = hf_model.config, type(hf_model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder model: Beamwise decodes decoder-only models")
    kinds = set(_layer_types(config)) - {"full_attention", "sliding_attention", "chunked_attention"}
    if getattr(hf_model, "_is_stateful", False) or kinds:
        raise UnsupportedError(f"{name} keeps a recurrent state ({', '.join(sorted(kinds)) or 'stateful'}): no forest")
    if getattr(config.get_text_config(), "alibi", False):
        raise UnsupportedError(f"{name} uses ALiBi, which reads positions from the mask: use a model with positions")


def check_length(model: CausalModel, length: int) -> None:
    """Refuse lengths at which a windowed attention would drop tokens, since the forest's mask keeps them all.

    Args:
        model: the model.
        length: prompt and new tokens together.

    Raises:
        UnsupportedError: the window is shorter.
    """
    config = model.model.config.get_text_config()
    kinds = _layer_types(config)
    windows = {
        "sliding_attention": int(getattr(config, "sliding_window", None) or 0),
        "chunked_attention": int(getattr(config, "attention_chunk_size", None) or 0),
    }
    if not kinds and getattr(config, "use_sliding_window", True):
        kinds = ["sliding_attention"]  # configurations without layer types window every layer, if any
    active = [windows[kind] for kind in kinds if windows.get(kind)]
    if active and length > min(active):
        raise UnsupportedError(
            f"{type(model.model).__name__} attends to a window of {min(active)} tokens, and prompt plus new tokens "
            f"make {length}: stay within the window"
        )


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config.get_text_config(), "layer_types", None) or [])


@torch.no_grad()
def _compare_with_plain_forward(model: CausalModel, name: str) -> None:
    tokens = torch.arange(6, device=model.device) % model.vocab_size
    forest = Forest(tokens[:2], model.device)
    root = forest.add_root(tokens[2:3])
    children = forest.add(torch.cat([root, root]), tokens[3:5])
    forest.add(children[:1], tokens[5:6])
    pool = KVPool(model, rows=1, capacity=8)
    try:
        ours = pool.forward([0], [forest], [3])[0].double()  # both children, and the first one's child
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedError(f"{name} does not take a tree mask over a KV pool: {error}") from error
    left = torch.cat([tokens[:4], tokens[5:6]]).unsqueeze(0)
    right = torch.cat([tokens[:3], tokens[4:5]]).unsqueeze(0)
    plain_left = model.model(input_ids=left, use_cache=False).logits[0]
    plain_right = model.model(input_ids=right, use_cache=False).logits[0]
    plain = torch.stack([plain_left[3], plain_right[3], plain_left[4]]).double()
    if bool(plain.isnan().any()):
        raise NumericalError(
            f"{name} returns NaN logits in {model.model.dtype}: check its weights, or take a wider dtype"
        )
    difference = float((ours - plain).norm() / plain.norm().clamp_min(1e-30))
    if not difference <= _TOLERANCE.get(model.model.dtype, 0.1):
        raise UnsupportedError(
            f"{name} gives other logits under a tree mask than token by token (relative difference {difference:.1e}): "
            "its attention does not follow an explicit mask and positions"
        )
