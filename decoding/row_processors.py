"""Logits processors of a whole batch, taken apart prompt by prompt.

``generate`` builds its processors for all rows at once, and some of them count rows: a prefix constraint is asked by
prompt number, a repetition penalty knows each row's padding. The decoder calls them with the live beams of one prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

REFUSED = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""They keep a state per row and step, or run the model themselves: beams that come and go would break them."""


def processors_of_row(processors: LogitsProcessorList, number: int, num_prompts: int) -> LogitsProcessorList:
    """The processors as they treat one prompt of the batch, for however many of its beams are live.

    Args:
        processors: as ``generate`` prepared them.
        number: of the prompt.
        num_prompts: prompts in the batch.
    """
    return LogitsProcessorList([_of_row(processor, number, num_prompts) for processor in processors])


def _of_row(processor: Any, number: int, num_prompts: int) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return _RowPrefixConstraint(processor._prefix_allowed_tokens_fn, number)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):  # one length a row; rows may be expanded by num_beams
            row = number * (ignored.shape[0] // num_prompts)
            return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=int(ignored[row]))
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        alone = copy.copy(processor)
        alone.encoder_input_ids = cast(torch.LongTensor, processor.encoder_input_ids[number : number + 1])
        return alone
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        alone_ngram = copy.copy(processor)
        alone_ngram.batch_size = 1
        alone_ngram.generated_ngrams = processor.generated_ngrams[number : number + 1]
        return alone_ngram
    return processor


class _RowPrefixConstraint:
    """`PrefixConstrainedLogitsProcessor` of one prompt."""

    def __init__(self, allowed: Callable[[int, torch.Tensor], list[int]], number: int) -> None:
        self._allowed = allowed
        self._number = number

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        one_prompt = PrefixConstrainedLogitsProcessor(lambda _, ids: self._allowed(self._number, ids), len(input_ids))
        return cast(torch.Tensor, one_prompt(input_ids, scores))
