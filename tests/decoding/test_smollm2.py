"""The real SmolLM2 in float32: greedy equality with transformers, and nothing but the seed changes the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beamwise.commands.loading import load_draft_model, shipped_draft
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.models import SMOLLM2
from beamwise.decoding.prompts import encode_prompt, read_prompts
from beamwise.decoding.widths import FixedWidth, RandomWidth

pytestmark = pytest.mark.smollm2
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
TIE = 1e-5
"""Two hypotheses whose scores differ by less may change places: float32 sums in another order."""


def batch(tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, torch.Tensor]:
    """The first prompts, padded on the left."""
    tokens = [encode_prompt(tokenizer, prompt.text) for prompt in read_prompts(PROMPTS)[:count]]
    longest = max(len(ids) for ids in tokens)
    padding = [longest - len(ids) for ids in tokens]
    ids = torch.tensor([[2] * pad + ids for pad, ids in zip(padding, tokens, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def score(model: PreTrainedModel, prompt: torch.Tensor, generated: torch.Tensor) -> float:
    """Mean log-likelihood of the generated tokens, EOS included, padding not; from one plain forward."""
    tokens = generated.tolist()
    length = tokens.index(2) + 1 if 2 in tokens else len(tokens)
    ids = torch.cat([prompt, generated[:length]])
    log_probs = torch.log_softmax(model(ids[None]).logits[0].double(), dim=-1)
    chosen = log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
    return float(chosen.mean())


@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
def test_greedy_equals_transformers_on_real_prompts(smollm2: Loaded, num_beams: int) -> None:
    model, tokenizer = smollm2
    inputs = batch(tokenizer, 22)
    options: dict[str, Any] = {"num_beams": num_beams, "do_sample": False, "max_new_tokens": 12}
    theirs = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=SpeculativeBeams(gamma=3, batch_size=11))
    ties = 0
    for ids, mask, mine, other in zip(inputs["input_ids"], inputs["attention_mask"], ours, theirs, strict=True):
        if torch.equal(mine, other):
            continue
        prompt = ids[mask.bool()]
        scores = [score(model, prompt, tokens[len(ids) :]) for tokens in (mine, other)]
        assert abs(scores[0] - scores[1]) < TIE, f"{scores}: {tokenizer.decode(mine)} | {tokenizer.decode(other)}"
        ties += 1
    print(f"W={num_beams}: {len(ours) - ties} of {len(ours)} equal, {ties} ties within {TIE}")
    assert ties <= 2


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_and_policies_change_nothing(smollm2: Loaded, do_sample: bool) -> None:
    model, tokenizer = smollm2
    inputs = batch(tokenizer, 2)
    options: dict[str, Any] = {"num_beams": 4, "do_sample": do_sample, "max_new_tokens": 12}
    where = shipped_draft(SMOLLM2)
    draft = None if where is None else load_draft_model(where, model)
    settings: list[dict[str, Any]] = [
        {"drafter": "none"},
        {"drafter": "lookup", "policy": FixedWidth(3, 6)},
        {"drafter": "lookup", "policy": RandomWidth(4, (2, 9), seed=1), "batch_size": 1},
    ]
    if draft is not None:
        settings += [
            {"draft_model": draft, "drafter": "model", "policy": FixedWidth(2, 12)},
            {"draft_model": draft, "drafter": "union", "policy": RandomWidth(4, (4, 16), seed=3), "batch_size": 2},
        ]
    outputs = [
        model.generate(**inputs, **options, custom_generate=SpeculativeBeams(seed=5, **item)) for item in settings
    ]
    for item, output in zip(settings[1:], outputs[1:], strict=True):
        assert torch.equal(output, outputs[0]), item


def test_slots_are_the_distinct_prefixes_of_the_live_beams(smollm2_bf16: Loaded) -> None:
    """At W = 8, after every block: no slot but those that a tree of the live beams needs, far below W sequences."""
    model, tokenizer = smollm2_bf16
    ids = torch.tensor([encode_prompt(tokenizer, read_prompts(PROMPTS)[0].text)])
    ratios = []

    def check(record: BlockRecord) -> None:
        if not record.row.finished.done:
            sequences = record.row.live.sequences_LT.tolist()
            prefixes = {tuple(tokens[:length]) for tokens in sequences for length in range(1, len(tokens) + 1)}
            assert record.row.forest.num_slots == len(prefixes)
            ratios.append(len(prefixes) / len(sequences[0]))

    beams = SpeculativeBeams(drafter="lookup", gamma=2, draft_width=12, observer=check)
    model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=8, max_new_tokens=80, custom_generate=beams)
    print(f"slots over those of one sequence: mean {sum(ratios) / len(ratios):.2f}, most {max(ratios):.2f}")
    assert len(ratios) > 40
    assert max(ratios) < 4.0  # transformers keeps 8.0
