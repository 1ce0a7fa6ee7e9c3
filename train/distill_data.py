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


def read_prompts(files: Sequence[str]) -> list[dict[str, str]]:
    """Rows of JSONL files: ``prompt``, and optionally ``id``, ``category``, ``response``.

    Raises:
        InputError: a file that cannot be read, or a bad line (named by number).
    """
    rows = []
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"'{file}' cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{file}:{number}: not JSON ({error}): write one JSON object a line") from error
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
                raise InputError(f"{file}:{number}: no text under 'prompt': each line needs one")
            row.setdefault("id", f"{Path(file).stem}-{number}")
            row.setdefault("category", Path(file).stem)
            rows.append(row)
    return rows


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a user's prompt, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return list(cast("dict[str, list[int]]", encoded)["input_ids"])


def write_responses(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    cache: Path,
    *,
    settings: Sequence[Sampling] = RESPONSE_SETTINGS,
    max_prompt_tokens: int = 700,
    max_new_tokens: int = 256,
    batch_size: int = 48,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Responses for prompts: a row's own where it has one and ``settings`` is empty, else written by the target.

    Args:
        target: writes the responses, batched with left padding.
        tokenizer: its tokenizer.
        rows: from `read_prompts`.
        cache: JSONL file of responses; those already there are kept, so an interrupted run continues.
        settings: decoding settings to draw from, batch by batch; empty to take the rows' own responses.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: longest response.
        batch_size: prompts per batch.
        seed: of the settings and the sampling.
        progress: called with (prompts done, prompts in all).

    Returns:
        One record per prompt that was not left out.
    """
    eos = tokenizer.eos_token_id
    items = [(row, prompt_tokens(tokenizer, row["prompt"])) for row in rows]
    items = [(row, ids) for row, ids in items if 0 < len(ids) <= max_prompt_tokens]
    if not settings:
        texts = [(row, ids, tokenizer(row["response"], add_special_tokens=False)["input_ids"]) for row, ids in items]
        return [Record(row["id"], row["category"], ids, [*text, eos]) for row, ids, text in texts]
    done = {record.id: record for record in _read_records(cache)} if cache.is_file() else {}
    todo = [(row, ids) for row, ids in items if row["id"] not in done]
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
            for (row, ids), response in zip(batch, responses, strict=True):
                if eos in response:
                    response = response[: response.index(eos) + 1]
                record = Record(row["id"], row["category"], ids, response)
                out.write(json.dumps(vars(record)) + "\n")
                done[record.id] = record
            out.flush()
            if progress is not None:
                progress(start + len(batch), len(todo))
    return [done[row["id"]] for row, _ in items]


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
