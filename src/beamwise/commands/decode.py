"""Decoding a list of prompts for the commands: batches, counters per prompt, texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from beamwise.decoding.errors import InputError

if TYPE_CHECKING:
    from beamwise.decoding.engine import BlockRecord
    from beamwise.decoding.generate import SpeculativeBeams
    from beamwise.decoding.prompts import Prompt
    from beamwise.decoding.stats import DecodeStats

    from .loading import Models

OnProgress = Callable[[int, int], None]
"""Called with (prompts finished, layers decoded) since the last call."""


@dataclass(frozen=True)
class Decoded:
    """What became of one prompt.

    Attributes:
        sequences: int64 tensors (T,), the new tokens of each returned hypothesis, best first, EOS included.
        texts: the same as text, without special tokens.
        scores: their scores; None for a single beam, which has none.
        stats: what the prompt cost.
        seconds: wall clock from the moment it entered the batch to its last block.
    """

    sequences: list[torch.Tensor]
    texts: list[str]
    scores: list[float] | None
    stats: DecodeStats
    seconds: float


class Meter:
    """An observer of the engine that keeps each prompt's counters and seconds.

    Args:
        on_progress: called after every block.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self.begin()

    def begin(self) -> None:
        """A call of ``generate`` starts: forget the last one."""
        self.stats: dict[int, DecodeStats] = {}
        self.seconds: dict[int, float] = {}
        self._start = time.perf_counter()
        self._entered: dict[int, float] = {}  # row of the batch -> when its current prompt took it

    def __call__(self, block: BlockRecord) -> None:
        """Take in one block of one prompt."""
        row, now = block.row, time.perf_counter()
        self.stats[row.request.stream] = row.stats
        self.seconds[row.request.stream] = now - self._entered.get(row.index, self._start)
        if row.finished.done:
            self._entered[row.index] = now
        if self._on_progress is not None:
            self._on_progress(int(row.finished.done), len(block.verification.layers))


def check_lengths(models: Models, prompts: Sequence[Prompt], tokens: Sequence[list[int]], max_new_tokens: int) -> None:
    """Refuse prompts that cannot be decoded by name, before the first is decoded.

    Args:
        models: the target's positions and tokenizer.
        prompts: the prompts, for the message.
        tokens: their token ids.
        max_new_tokens: longest continuation.

    Raises:
        InputError: a prompt without tokens, or beyond the model's positions.
    """
    positions = getattr(models.target.config.get_text_config(), "max_position_embeddings", None)
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise InputError(f"{prompt.source}: the tokenizer makes no tokens of this prompt; give other words")
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise InputError(
                f"{prompt.source}: the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}, but the "
                f"model has {positions} positions; shorten the prompt or ask for at most "
                f"{max(positions - len(ids), 0)} new tokens"
            )


def decode_prompts(
    models: Models,
    beams: SpeculativeBeams,
    meter: Meter,
    tokens: Sequence[list[int]],
    arguments: dict[str, Any],
) -> list[Decoded]:
    """Decode prompts in one call of ``generate``, so that the engine can fill its batch with whatever comes next.

    Where the search reads the prompt's tokens (repetition_penalty, no_repeat_ngram_size), padding would change the
    result, so prompts of different lengths are decoded one after the other then.

    Args:
        models: target and tokenizer.
        beams: how to decode.
        meter: the observer that ``beams`` was made with.
        tokens: token ids of each prompt.
        arguments: for ``model.generate``.

    Returns:
        One outcome per prompt, in order.
    """
    reads_prompt = arguments.get("repetition_penalty", 1.0) != 1.0 or arguments.get("no_repeat_ngram_size", 0) > 0
    one_by_one = reads_prompt and len({len(ids) for ids in tokens}) > 1
    groups = [[ids] for ids in tokens] if one_by_one else [list(tokens)]
    first_seed = beams.seed
    decoded: list[Decoded] = []
    for number, group in enumerate(groups):
        if first_seed is not None:  # far apart, so that neighbouring seeds of the user's share no noise
            beams.seed = (first_seed + number * 0x1E3779B97F4A7C15) % 2**62
        decoded += _decode_group(models, beams, meter, group, arguments)
    beams.seed = first_seed
    return decoded


def _decode_group(
    models: Models,
    beams: SpeculativeBeams,
    meter: Meter,
    tokens: list[list[int]],
    arguments: dict[str, Any],
) -> list[Decoded]:
    inputs = pad_left(tokens, models.target.device)
    meter.begin()
    generate = cast(Any, models.target).generate
    output = generate(**inputs, **arguments, custom_generate=beams, return_dict_in_generate=True)
    new_tokens = output.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    returned = new_tokens.shape[0] // len(tokens)
    scores = getattr(output, "sequences_scores", None)
    decoded = []
    for number in range(len(tokens)):
        rows = range(number * returned, (number + 1) * returned)
        sequences = [cut_at_eos(new_tokens[row], models) for row in rows]
        decoded.append(
            Decoded(
                sequences,
                [str(models.tokenizer.decode(sequence, skip_special_tokens=True)) for sequence in sequences],
                None if scores is None else [float(scores[row]) for row in rows],
                meter.stats[number],
                meter.seconds[number],
            )
        )
    return decoded


def pad_left(tokens: Sequence[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask``, int64 (B, T), of prompts padded on the left."""
    longest = max(len(ids) for ids in tokens)
    input_ids = torch.zeros(len(tokens), longest, dtype=torch.int64)  # which token pads is of no account: it is masked
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(tokens):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    return {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}


def cut_at_eos(new_tokens_T: torch.Tensor, models: Models) -> torch.Tensor:
    """The tokens up to the first EOS, that included; what follows is padding."""
    eos = models.target.generation_config.eos_token_id
    if eos is None:
        return new_tokens_T
    ends = torch.isin(new_tokens_T, torch.tensor(eos)).nonzero()
    return new_tokens_T[: int(ends[0]) + 1] if ends.shape[0] else new_tokens_T
