"""A benchmark at the smallest size: tiny models in folders, a few prompts with categories and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from transformers import LlamaForCausalLM

from beamwise.commands.bench import BenchOptions
from tests.tiny_folder import save_tiny_folder

PROMPTS = [
    {"id": "a", "category": "gsm8k", "prompt": "one two three", "answer": "3"},
    {"id": "b", "category": "context_qa", "prompt": "who likes the moon", "answer": "the cat"},
    {"id": "c", "category": "lists", "prompt": "red blue green red blue"},
    {"id": "d", "category": "lists", "prompt": "what the cat sees"},
]


def make_options(folder: Path, make: Callable[..., LlamaForCausalLM], **changes: object) -> BenchOptions:
    """Options of a run on the CPU, with its models and prompts written to a folder."""
    target, draft, data = folder / "target", folder / "draft", folder / "data"
    if not data.exists():
        save_tiny_folder(target, make(0, vocab_size=48, scale=0.3))
        save_tiny_folder(draft, make(3, vocab_size=48, layers=1, scale=0.3))
        data.mkdir()
        (data / "p.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    settings: dict[str, object] = {
        "prompts": ["p.jsonl"],
        "data": str(data),
        "out": str(folder / "out"),
        "num_beams": [1, 2],
        "dtypes": ["float32"],
        "devices": ["cpu"],
        "max_new_tokens": 6,
        "target": str(target),
        "draft": str(draft),
        "drafter": "model",
        "controller": "none",
    }
    return BenchOptions(**{**settings, **changes})  # type: ignore[arg-type]
