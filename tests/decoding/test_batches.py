"""Rows of a batch, whoever shares it and in whatever order they come, against each prompt alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from beamwise.decoding.config import DecodeConfig, RunnerName
from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.drafter_choice import DrafterName, make_drafter
from beamwise.decoding.engine import Engine
from beamwise.decoding.errors import ConfigError, InputError
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.kv_pool import KVPool
from beamwise.decoding.rows import Request, Result
from beamwise.decoding.rules import make_rules
from beamwise.decoding.stream import StreamResult, decode_stream
from beamwise.decoding.widths import FixedWidth, RandomWidth
from tests.conftest import make_tiny_llama

VOCAB = 40


@functools.cache
def target() -> LlamaForCausalLM:
    return make_tiny_llama(7, vocab_size=VOCAB, layers=3)


@functools.cache
def draft(kind: str) -> Any:
    return build_draft(target(), kind, [0, 2], torch.arange(1, VOCAB, 2))


def make_request(prompt: list[int], stream: int, config: DecodeConfig, eos: int) -> Request:
    eos_ids = torch.tensor([eos])
    stops = [MaxLengthCriteria(len(prompt) + config.max_new_tokens), EosTokenCriteria([eos])]
    rules = make_rules(LogitsProcessorList(), StoppingCriteriaList(stops), eos_ids, config, VOCAB)
    return Request(torch.tensor(prompt), 0, config, rules, stream)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Request], int, RunnerName]:
    """Requests that differ in everything, in order of arrival; rows; how they are run."""
    runner: RunnerName = draw(st.sampled_from(["eager", "buckets"]))
    requests = []
    for stream in range(draw(st.integers(2, 6))):
        do_sample = draw(st.booleans())
        config = DecodeConfig(
            num_beams=draw(st.integers(1, 4)),
            max_new_tokens=draw(st.integers(1, 16)),
            do_sample=do_sample,
            early_stopping=draw(st.sampled_from([True, False, "never"])),
            verification=draw(st.sampled_from(["coupled", "rejection"])) if do_sample else "coupled",
            seed=draw(st.integers(0, 3)),
            runner=runner,
        )
        prompt = draw(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9))
        requests.append(make_request(prompt, stream, config, eos=draw(st.integers(0, 5))))
    return draw(st.permutations(requests)), draw(st.integers(1, 4)), runner


def same(ours: Result, alone: Result) -> None:
    assert [h.sequence_T.tolist() for h in ours.hypotheses] == [h.sequence_T.tolist() for h in alone.hypotheses]
    assert [h.score for h in ours.hypotheses] == pytest.approx([h.score for h in alone.hypotheses], abs=1e-9)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches(), lazy=st.booleans(), drafter=st.sampled_from(["pruned", "feature", "lookup", "none"]))
def test_every_row_is_what_it_is_alone(batch: tuple[list[Request], int, RunnerName], lazy: bool, drafter: str) -> None:
    requests, rows, _ = batch

    def engine(rows: int) -> Engine:
        name = cast(DrafterName, "union" if drafter in ("pruned", "feature") else drafter)
        model = draft(drafter) if drafter in ("pruned", "feature") else None
        return Engine(target(), make_drafter(name, model, target()), FixedWidth(2, 6), rows)

    together = dict(engine(rows).decode(iter(requests) if lazy else requests))
    single = engine(1)
    for number, request in enumerate(requests):
        [(_, alone)] = single.decode([request])
        same(together[number], alone)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches(), seed=st.integers(0, 99))
def test_nor_does_it_depend_on_the_widths_drafted_for_the_others(
    batch: tuple[list[Request], int, RunnerName], seed: int
) -> None:
    requests, rows, _ = batch
    requests = [request for request in requests if not request.config.rejection]  # there widths change the draws
    policy = RandomWidth(3, (1, 4, 9), seed)
    together = dict(Engine(target(), make_drafter("model", draft("pruned"), target()), policy, rows).decode(requests))
    for number, request in enumerate(requests):
        [(_, alone)] = Engine(target()).decode([request])
        same(together[number], alone)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator) for n in (3, 9, 1, 5, 7, 2)]


def sequences(results: list[StreamResult]) -> dict[int, list[list[int]]]:
    return {result.number: [h.sequence_T.tolist() for h in result.hypotheses] for result in results}


@pytest.mark.parametrize("do_sample", [False, True])
def test_streams_do_not_depend_on_the_batch_size(do_sample: bool) -> None:
    arguments: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 14,
        "do_sample": do_sample,
        "repetition_penalty": 1.3,  # reads the prompt, which no padding may lengthen
    }
    results = []
    for batch_size in (1, 4):
        beams = SpeculativeBeams(draft_model=draft("pruned"), gamma=2, seed=3, batch_size=batch_size)
        results.append(list(decode_stream(beams, target(), prompts(), **arguments)))
        assert [result.number for result in results[-1]] == list(range(6))
        assert beams.stats.layers == sum(result.stats.layers for result in results[-1])
    assert sequences(results[0]) == sequences(results[1])
    if not do_sample:
        for prompt, result in zip(prompts(), results[1], strict=True):
            plain = cast(Any, target()).generate(
                prompt[None], attention_mask=torch.ones_like(prompt[None]), pad_token_id=VOCAB - 1, **arguments
            )
            for hypothesis, tokens in zip(result.hypotheses, plain, strict=True):
                length = hypothesis.sequence_T.shape[0]
                assert hypothesis.sequence_T.tolist() == tokens[:length].tolist()
                assert (tokens[length:] == VOCAB - 1).all()


def test_results_come_as_they_finish() -> None:
    beams = SpeculativeBeams(gamma=2, batch_size=3)
    arguments: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 20, "early_stopping": True}
    ordered = list(decode_stream(beams, target(), prompts(), **arguments))
    finished = list(decode_stream(beams, target(), prompts(), ordered=False, **arguments))
    assert sequences(ordered) == sequences(finished)
    assert sorted(result.number for result in finished) == list(range(6))


def test_a_prompt_is_asked_for_when_a_row_is_free() -> None:
    beams = SpeculativeBeams(gamma=2, batch_size=2)
    asked = []

    def source() -> Iterator[torch.Tensor]:
        for number, prompt in enumerate(prompts()):
            asked.append(number)
            yield prompt

    stream = decode_stream(beams, target(), source(), ordered=False, num_beams=2, max_new_tokens=8)
    done = 0
    for _ in stream:
        done += 1
        assert len(asked) <= done + 1  # two rows: the one that just ended is free, but not filled yet
    assert done == len(asked) == 6


def test_later_prompts_may_be_longer_than_the_first() -> None:
    """The storage was made for the first one: it grows."""
    long = torch.arange(300) % VOCAB
    for runner in ("eager", "buckets"):
        beams = SpeculativeBeams(gamma=2, batch_size=2, runner=cast(RunnerName, runner))
        arguments: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 6}
        stream = list(decode_stream(beams, target(), [prompts()[0], long, prompts()[1]], **arguments))
        alone = list(decode_stream(beams, target(), [long], **arguments))
        assert sequences(stream)[1] == sequences(alone)[0]


def test_what_a_stream_refuses() -> None:
    beams = SpeculativeBeams(gamma=2, batch_size=2)
    assert list(decode_stream(beams, target(), [], num_beams=2)) == []
    with pytest.raises(InputError, match=r"prompt 0 of the stream has shape \(1, 3\)"):
        list(decode_stream(beams, target(), [torch.ones(1, 3, dtype=torch.int64)], num_beams=2))
    with pytest.raises(ConfigError, match="attention_mask"):
        list(decode_stream(beams, target(), prompts(), attention_mask=None))
    with pytest.raises(InputError, match="shorten the prompt"):
        list(decode_stream(beams, target(), [prompts()[0], torch.ones(600, dtype=torch.int64)], max_new_tokens=9))


def test_two_streams_of_one_decoder_do_not_mix() -> None:
    beams = SpeculativeBeams(gamma=2)
    first = decode_stream(beams, target(), prompts(), num_beams=2, max_new_tokens=5)
    next(first)
    with pytest.raises(InputError, match="exhaust or close that iterator first"):
        next(decode_stream(beams, target(), prompts(), num_beams=2, max_new_tokens=5))
    first.close()  # type: ignore[attr-defined]
    assert len(list(decode_stream(beams, target(), prompts(), num_beams=2, max_new_tokens=5))) == 6


def test_a_long_prompt_does_not_pad_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It enters while another row is in the middle of its text."""
    shapes = []
    call = KVPool._call

    def recorded(self: KVPool, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return call(self, tokens, *rest)

    monkeypatch.setattr(KVPool, "_call", recorded)
    beams = SpeculativeBeams(drafter="none", batch_size=2)
    long = torch.arange(200) % VOCAB
    stream = [prompts()[0], long, prompts()[2], long[:150]]
    together = list(decode_stream(beams, target(), stream, num_beams=2, max_new_tokens=7))
    assert all(rows == 1 or tokens <= 70 for rows, tokens in shapes)
    assert any(rows == 2 for rows, _ in shapes)
    for number in (1, 3):
        [alone] = decode_stream(beams, target(), [stream[number]], num_beams=2, max_new_tokens=7)
        assert sequences([together[number]])[number] == sequences([alone])[0]
