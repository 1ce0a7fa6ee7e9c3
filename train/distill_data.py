"""Data for distilling a draft: on-policy responses of the target, and what the target thinks at each of their tokens.

Both are cached on disk. The teacher's last hidden state is enough to recover its full distribution, since the head is
shared and frozen: one matrix product instead of a forward through every layer, however many epochs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beamwise.decoding.errors import InputError
from beamwise.decoding.prompts import Prompt, encode_prompt

Sampling = dict[str, Any]
RESPONSE_SETTINGS: tuple[Sampling, ...] = (
    {"do_sample": True, "temperature": 1.0, "top_k": 50},
    {"do_sample": True, "temperature": 1.0, "top_k": 50},
    {"do_sample": True, "temperature": 1.0, "top_k": 0},
    {"do_sample": True, "temperature": 0.7, "top_k": 50},
    {"do_sample": False},
)
"""How responses are written, drawn batch by batch: what a user decodes with."""


@dataclass(frozen=True)
class Record:
    """A prompt and a response as token ids, with the prompt's category."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]


def write_responses(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    cache: Path,
    *,
    settings: Sequence[Sampling] = RESPONSE_SETTINGS,
    max_prompt_tokens: int = 700,
    max_new_tokens: int = 256,
    batch_size: int = 48,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Responses for prompts, written by the target; or the records' own ``response``, where ``settings`` is empty.

    Args:
        target: writes the responses, batched with left padding.
        tokenizer: its tokenizer.
        prompts: from `decoding.prompts.read_prompts`.
        cache: JSONL file of responses; those already there are kept, so an interrupted run continues.
        settings: decoding settings to draw from, batch by batch; empty to take the records' own responses.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: longest response.
        batch_size: prompts per batch.
        seed: of the settings and the sampling.
        progress: called with (prompts done, prompts in all).

    Returns:
        One record per prompt that was not left out.

    Raises:
        InputError: a record without a ``response`` where it is wanted.
    """
    eos = tokenizer.eos_token_id
    items = [(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    items = [(prompt, ids) for prompt, ids in items if 0 < len(ids) <= max_prompt_tokens]
    if not settings:
        return [_own_response(tokenizer, prompt, ids) for prompt, ids in items]
    done = {record.id: record for record in _read_records(cache)} if cache.is_file() else {}
    todo = [(prompt, ids) for prompt, ids in items if prompt.id not in done]
    rng = random.Random(seed)
    rng.shuffle(todo)
    tokenizer.padding_side = "left"
    with cache.open("a", encoding="utf-8") as out:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            choice = rng.choice(list(settings))
            torch.manual_seed(hash((seed, start)) & 0xFFFFFFFF)
            encoded = tokenizer.pad({"input_ids": [ids for _, ids in batch]}, return_tensors="pt").to(target.device)
            output = cast(Any, target).generate(**encoded, max_new_tokens=max_new_tokens, **choice)
            responses = output[:, encoded["input_ids"].shape[1] :].tolist()
            for (prompt, ids), response in zip(batch, responses, strict=True):
                if eos in response:
                    response = response[: response.index(eos) + 1]
                record = Record(prompt.id, _category(prompt), ids, response)
                out.write(json.dumps(vars(record)) + "\n")
                done[record.id] = record
            out.flush()
            if progress is not None:
                progress(start + len(batch), len(todo))
    return [done[prompt.id] for prompt, _ in items]


def _category(prompt: Prompt) -> str:
    return str(prompt.record.get("category", "all"))


def _own_response(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ids: list[int]) -> Record:
    response = prompt.record.get("response")
    if not isinstance(response, str):
        raise InputError(f"{prompt.source}: no text under 'response'; off-policy training needs one on each line")
    text = list(tokenizer(response, add_special_tokens=False)["input_ids"])
    return Record(prompt.id, _category(prompt), ids, [*text, tokenizer.eos_token_id])


def _read_records(path: Path) -> Iterable[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the torn last line of a run that was killed: written again
        yield Record(row["id"], row["category"], row["prompt_ids"], row["response_ids"])


@dataclass(frozen=True)
class TeacherSequence:
    """One prompt and response with the target's view of it. T tokens.

    Attributes:
        category: of the prompt.
        tokens_T: int64 (T,).
        hidden_TH: the target's last hidden states, (T, hidden).
        first: position of the last prompt token: the first whose next token is the response's.
    """

    category: str
    tokens_T: torch.Tensor
    hidden_TH: torch.Tensor
    first: int


@torch.no_grad()
def teacher_cache(
    target: PreTrainedModel,
    records: Sequence[Record],
    folder: Path,
    *,
    max_tokens: int,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> list[TeacherSequence]:
    """The target's last hidden states along records, computed once and kept in ``folder``.

    Args:
        target: the teacher.
        records: prompts and responses.
        folder: cache; its file name carries a fingerprint of the records and the length limit.
        max_tokens: sequences are cut to so many tokens, at the front, so that the response stays.
        batch_size: sequences per forward (sorted by length, right-padded).
        progress: called with (sequences done, sequences in all).

    Returns:
        One entry per record; hidden states in bfloat16.
    """
    path = folder / f"teacher-{fingerprint(records, max_tokens)}.safetensors"
    cut = [_cut(record, max_tokens) for record in records]
    if not path.is_file():
        order = sorted(range(len(cut)), key=lambda index: len(cut[index][0]))
        hidden: list[torch.Tensor] = [torch.empty(0)] * len(cut)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            longest = len(cut[batch[-1]][0])
            tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, index in enumerate(batch):
                tokens[row, : len(cut[index][0])] = torch.tensor(cut[index][0])
            # causal attention: padding on the right cannot reach the real tokens
            states = target.base_model(input_ids=tokens.to(target.device), use_cache=False).last_hidden_state
            for row, index in enumerate(batch):
                hidden[index] = states[row, : len(cut[index][0])].to(torch.bfloat16).cpu()
            if progress is not None:
                progress(start + len(batch), len(order))
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"hidden": torch.cat(hidden)}, scratch)
        scratch.rename(path)
    states = torch.split(load_file(path)["hidden"], [len(tokens) for tokens, _ in cut])
    return [
        TeacherSequence(record.category, torch.tensor(tokens), state, first)
        for record, (tokens, first), state in zip(records, cut, states, strict=True)
    ]


def _cut(record: Record, max_tokens: int) -> tuple[list[int], int]:
    tokens = record.prompt_ids + record.response_ids
    dropped = max(len(tokens) - max_tokens, 0)
    return tokens[dropped:], max(len(record.prompt_ids) - 1 - dropped, 0)


def fingerprint(records: Sequence[Record], max_tokens: int = 0) -> str:
    """Short hash of records' tokens and a length limit."""
    digest = hashlib.sha256(str(max_tokens).encode())
    for record in records:
        digest.update(json.dumps([record.prompt_ids, record.response_ids]).encode())
    return digest.hexdigest()[:16]


def frequent_tokens(records: Sequence[Record], size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent tokens of the responses (then the lowest ids), increasing. int64 (size,)."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for record in records:
        ids = torch.tensor(record.response_ids, dtype=torch.int64)
        counts.index_add_(0, ids, torch.ones_like(ids))
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values
