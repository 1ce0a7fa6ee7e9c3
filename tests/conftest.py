"""Fixtures: tiny random models for exact work, and the real SmolLM2, loaded once per worker."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a network
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # threads that spin for long at barriers starve the other worker

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from beamwise.decoding.models import SMOLLM2, load_model
from tests.tiny_folder import save_tiny_folder

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real-model tests share one worker, so that the model is loaded once."""
    for item in items:
        if item.get_closest_marker("smollm2"):
            item.add_marker(pytest.mark.xdist_group("smollm2"))


def make_tiny_llama(
    seed: int = 0,
    vocab_size: int = 32,
    hidden_size: int = 16,
    layers: int = 2,
    scale: float = 0.6,
    dtype: torch.dtype = torch.float64,
) -> LlamaForCausalLM:
    """A random Llama with weights of standard deviation ``scale``: peaked enough to be interesting."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=scale,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    return make_tiny_llama


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The real target in float32."""
    return load_model(SMOLLM2, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def smollm2_bf16() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The real target in bfloat16."""
    return load_model(SMOLLM2, dtype="bfloat16", device="cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., LlamaForCausalLM]) -> str:
    """A saved tiny model of 48 tokens, with a tokenizer."""
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"), tiny_llama(vocab_size=48))
