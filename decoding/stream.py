"""Decoding a stream of prompts: rows finish and leave, the next prompts enter (continuous batching)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from .engine import Engine
from .errors import ConfigError, InputError
from .finished import Hypothesis
from .generate import SpeculativeBeams
from .outputs import pad_hypotheses
from .rows import Request
from .stats import DecodeStats

_OWN = ("custom_generate", "inputs", "input_ids", "inputs_embeds", "attention_mask")


@dataclass(frozen=True)
class StreamResult:
    """A decoded prompt.

    Attributes:
        number: of the prompt in the stream, from 0 (or ``first_number``).
        prompt_T: its tokens.
        hypotheses: the best ``num_return_sequences``, best first: tokens with the prompt, and score (as ``generate``
            has them; of no meaning with one beam).
        stats: what it cost.
    """

    number: int
    prompt_T: torch.Tensor
    hypotheses: list[Hypothesis]
    stats: DecodeStats


def decode_stream(
    beams: SpeculativeBeams,
    model: PreTrainedModel,
    prompts: Iterable[torch.Tensor],
    ordered: bool = True,
    first_number: int = 0,
    **arguments: Any,
) -> Iterator[StreamResult]:
    """Decode prompts as they come, ``beams.batch_size`` at a time; each is asked for when a row becomes free.

    Every prompt's result is what it would be alone, whatever shares the batch with it: there is no padding, so that
    even penalties that read the prompt see its own tokens only. When sampling, a prompt's noise depends on the seed and
    on its number in the stream.

    Args:
        beams: how to decode; with ``seed=None`` one seed is drawn for the whole stream.
        model: the target.
        prompts: int64 (T,) token ids each, without padding.
        ordered: yield results in the order of the prompts; else as they finish.
        first_number: number of the first prompt: that of a stream that was cut off goes on where it ended.
        **arguments: of ``model.generate``: num_beams, max_new_tokens, do_sample, repetition_penalty, …

    Yields:
        One result per prompt.

    Raises:
        ConfigError: arguments that ``generate`` or this decoder does not take.
        InputError: a prompt is empty, too long or not one-dimensional. The prompts in the batch with it are lost.
        NumericalError: NaN logits.
    """
    taken = [name for name in _OWN if name in arguments]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: decode_stream sets this itself; pass the other arguments of generate")
    source = _Requests(beams, model, prompts, first_number, arguments)
    first = next(source, None)
    if first is None:
        return
    results = _decode(beams.engine(model, first.config.num_beams), source, first)
    beams.stats = DecodeStats()
    early: dict[int, StreamResult] = {}
    expected = first_number
    for result in results:
        beams.stats.add(result.stats)
        if not ordered:
            yield result
            continue
        early[result.number] = result
        while expected in early:
            yield early.pop(expected)
            expected += 1


def _decode(engine: Engine, source: _Requests, first: Request) -> Iterator[StreamResult]:
    waiting: dict[int, Request] = {}
    arrived = count()

    def arrivals() -> Iterator[Request]:
        request: Request | None = first
        while request is not None:
            waiting[next(arrived)] = request  # the engine counts from 0 whatever the stream's first number is
            yield request
            request = next(source, None)

    for arrival, result in engine.decode(arrivals()):
        request = waiting.pop(arrival)
        chosen = pad_hypotheses(result.hypotheses, request.prompt_T, request.config.num_return_sequences)
        yield StreamResult(request.stream, request.prompt_T, chosen, result.stats)


class _Requests:
    """An iterator of requests. ``generate`` itself prepares each one: it is called with a ``custom_generate`` that only
    takes down what it is asked for.
    """

    def __init__(
        self,
        beams: SpeculativeBeams,
        model: PreTrainedModel,
        prompts: Iterable[torch.Tensor],
        first_number: int,
        arguments: dict[str, Any],
    ) -> None:
        self._beams = beams
        self._model = model
        self._prompts = enumerate(prompts, first_number)
        self._arguments = arguments
        self._seed = beams.seed

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        number, prompt_T = next(self._prompts)
        if prompt_T.dim() != 1 or prompt_T.shape[0] == 0:
            raise InputError(
                f"prompt {number} of the stream has shape {tuple(prompt_T.shape)}: give token ids of shape (T,), T > 0"
            )
        taken: list[Request] = []

        def take_down(model: PreTrainedModel, input_ids: torch.Tensor, **asked: Any) -> torch.Tensor:
            asked.update(first_stream=number, seed=self._seed)
            taken.extend(self._beams.requests(model, input_ids, **asked))
            return input_ids

        input_ids = prompt_T.unsqueeze(0).to(self._model.device)
        cast(Any, self._model).generate(
            input_ids, attention_mask=torch.ones_like(input_ids), custom_generate=take_down, **self._arguments
        )
        self._seed = taken[0].config.seed
        return taken[0]
