"""Decoding a list of prompts for the commands: batches, counters per prompt, texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """An observer of the engine that keeps each prompt's seconds.

    Args:
        on_progress: called after every block.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self.begin()

    def begin(self) -> None:
        """A call of ``generate`` starts: forget the last one."""
        self.seconds: dict[int, float] = {}
        self._start = time.perf_counter()
        self._entered: dict[int, float] = {}  # row of the batch -> when its current prompt took it

    def __call__(self, block: BlockRecord) -> None:
        """Take in one block of one prompt."""
        row, now = block.row, time.perf_counter()
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
    tokens: Iterable[list[int]],
    arguments: dict[str, Any],
    first_number: int = 0,
) -> Iterator[Decoded]:
    """Decode prompts, ``beams.batch_size`` at a time: as one ends, the next one takes its row.

    Args:
        models: target and tokenizer.
        beams: how to decode.
        meter: the observer that ``beams`` was made with.
        tokens: token ids of each prompt; the next one is asked for when a row is free.
        arguments: for ``model.generate``.
        first_number: number of the first prompt, on which its noise depends.

    Yields:
        One outcome per prompt, in order; the same whatever the batch size.
    """
    from beamwise.decoding.stream import decode_stream

    meter.begin()
    prompts = (torch.tensor(ids, dtype=torch.int64) for ids in tokens)
    for result in decode_stream(beams, models.target, prompts, first_number=first_number, **arguments):
        length = result.prompt_T.shape[0]
        sequences = [hypothesis.sequence_T[length:].cpu() for hypothesis in result.hypotheses]
        yield Decoded(
            sequences,
            [str(models.tokenizer.decode(sequence, skip_special_tokens=True)) for sequence in sequences],
            [hypothesis.score for hypothesis in result.hypotheses] if arguments["num_beams"] > 1 else None,
            result.stats,
            meter.seconds[result.number],
        )


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
