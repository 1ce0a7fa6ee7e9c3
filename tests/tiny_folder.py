"""A tiny random model with a tokenizer of words, saved as a folder that the command line can load, and run on it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from beamwise.cli import main
from beamwise.commands.loading import silence_libraries

WORDS = ("the", "cat", "sees", "moon", "who", "likes", "what", "one", "two", "three", "red", "blue", "green")
CHAT_TEMPLATE = "{% for message in messages %}who {{ message['content'] }} what {% endfor %}"


def save_tiny_folder(folder: Path, model: LlamaForCausalLM, chat_template: str | None = None) -> str:
    """Save the model, in float32, beside a tokenizer of as many words."""
    size = model.config.vocab_size
    words = ["<s>", "</s>", "<unk>", *WORDS, *(f"word{number}" for number in range(size))][:size]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = chat_template
    silence_libraries()  # saving shows a bar, and tests look at stderr
    model.to(torch.float32).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def run_generate(target: str, *arguments: str) -> int:
    """Exit code of ``beamwise generate`` on a small model."""
    return main(["generate", "--target", target, "--device", "cpu", "--max-new-tokens", "8", *arguments])
