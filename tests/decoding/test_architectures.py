"""Architectures: decoded exactly, or refused by name before the first token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from beamwise.decoding.errors import UnsupportedError
from beamwise.decoding.generate import SpeculativeBeams

COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GEMMA = {**COMMON, "num_key_value_heads": 1, "initializer_range": 0.3}
GPT2 = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
DECODED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "llama-grouped-by-one": ("Llama", {**COMMON, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", COMMON),
    "qwen3": ("Qwen3", COMMON),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 64, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window": 64}),
    "mistral": ("Mistral", {**COMMON, "sliding_window": 64}),
    "phi3": ("Phi3", COMMON),
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
}


def build(kind: str, options: dict[str, Any], **more: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**options, **more})
    name = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 1
    return model.to(torch.float64).eval()


def prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 48, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kernel) for name in DECODED for kernel in ("sdpa", "eager") if (name, kernel) != ("gemma2", "sdpa")],
)
def test_greedy_equals_transformers(name: str, implementation: str) -> None:
    kind, options = DECODED[name]
    model = build(kind, options)
    if implementation == "eager":
        # transformers' eager attention casts its mask to float32, where float64's lowest number is -inf: padded
        # rows become NaN there
        model = model.to(torch.float32)
    model.set_attn_implementation(implementation)
    for num_beams in (1, 4):
        arguments: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": 20, "do_sample": False}
        theirs = model.generate(**prompts(), **arguments)
        beams = SpeculativeBeams(draft_model=model, drafter="model", gamma=3, draft_width=6)
        assert torch.equal(model.generate(**prompts(), **arguments, custom_generate=beams), theirs)
        assert beams.stats.mean_acceptance_length > 1.5
    assert model.config.get_text_config()._attn_implementation == implementation  # the user's choice is left alone


def test_soft_capped_attention_works_eagerly_or_is_refused() -> None:
    model = build("Gemma2", {**GEMMA, "sliding_window": 64, "attn_logit_softcapping": 5.0}).to(torch.float32)
    model.set_attn_implementation("eager")
    arguments: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    theirs = model.generate(**prompts(), **arguments)
    assert torch.equal(model.generate(**prompts(), **arguments, custom_generate=SpeculativeBeams()), theirs)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_sliding_window_is_refused_beyond_its_length(name: str) -> None:
    kind, options = DECODED[name]
    model = build(kind, {**options, "sliding_window": 16})
    short = model.generate(**prompts(), num_beams=2, max_new_tokens=8, custom_generate=SpeculativeBeams())
    assert short.shape[0] == 2
    with pytest.raises(UnsupportedError, match="window of 16 tokens"):
        model.generate(**prompts(), num_beams=2, max_new_tokens=20, custom_generate=SpeculativeBeams())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Bloom", {"vocab_size": 48, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "Bloom"),
        ("Mamba", {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "recurrent state"),
        ("Mpt", {"vocab_size": 48, "d_model": 32, "n_layers": 2, "n_heads": 4}, "Mpt"),
    ],
)
def test_other_architectures_are_refused_by_name(kind: str, options: dict[str, Any], message: str) -> None:
    model = build(kind, options)
    with pytest.raises(UnsupportedError, match=message):
        model.generate(**prompts(), num_beams=2, max_new_tokens=4, custom_generate=SpeculativeBeams())


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=48, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        model.generate(torch.tensor([[3, 4]]), num_beams=2, max_new_tokens=4, custom_generate=SpeculativeBeams())


def test_flash_attention_is_refused_with_the_mend() -> None:
    model = build("Llama", COMMON)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        SpeculativeBeams().engine(model, 2)
