"""The law of everything that rejection verification and dynamic widths return, against exact enumeration.

Seeds are fixed; over the choice of the seed a correct program fails each test with probability 1e-3.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from beamwise.decoding import acceptance, rejection
from beamwise.decoding.drafters import ModelDrafter, Proposal
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.forest import Forest
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.widths import LayerPlan, LayerView
from tests.conftest import make_tiny_llama
from tests.decoding.enumeration import Tokens, chi_square_p_value, slot_beam_law, slots_law

FALSE_ALARM = 1e-3
EOS, DRAWS = 1, 1500
PROMPT = (2, 3)


@functools.cache
def model(seed: int, vocab: int) -> LlamaForCausalLM:
    return make_tiny_llama(seed, vocab_size=vocab, layers=1, hidden_size=8, scale=0.5)


@functools.cache
def next_log_probs(vocab: int, top_k: int) -> Any:
    @functools.cache
    def log_probs(tokens: Tokens) -> list[float]:
        with torch.no_grad():
            logits = model(0, vocab)(torch.tensor([PROMPT + tokens])).logits[0, -1].float()
        scores = torch.log_softmax(logits, 0)
        if top_k:
            scores = scores.masked_fill(scores < torch.topk(scores, top_k).values[-1], float("-inf"))
        return scores.tolist()

    return log_probs


class Reversed(ModelDrafter):
    """Proposes what the target finds unlikely: with top_k, tokens that it excludes."""

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        return [Proposal(-4.0 * p.logits_PV, p.token_ids_V) for p in super().propose(rows, forests, sequences)]


@dataclass(frozen=True)
class Scheduled:
    """Widths fixed in advance, by the number of the token; drafts as deep as allowed."""

    widths: tuple[int, ...]
    draft_width: int
    gamma: int = 9

    def start_block(self, num_beams: int) -> Scheduled:
        return self

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if view.layer >= self.gamma:
            return None
        position = round(float(view.context_features[4].exp())) - 1 + view.layer  # log_position, at the block's start
        return LayerPlan(self.widths[position], self.draft_width)


def decode(
    vocab: int, num_beams: int, max_new: int, drafter: Any, top_k: int = 0, draws: int = DRAWS, **settings: Any
) -> torch.Tensor:
    """Draws of all returned sequences, (draws, num_beams, T)."""
    named = {"good": (model(3, vocab), "model"), "same": (model(0, vocab), "model")}
    if drafter == "disjoint":
        draft_model, kind = None, Reversed(model(0, vocab), model(0, vocab))
    else:
        draft_model, kind = named[drafter]
    custom = SpeculativeBeams(draft_model, kind, seed=11, batch_size=100, **{"verification": "rejection", **settings})
    prompts = torch.tensor([PROMPT] * draws)
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams} if num_beams > 1 else {}
    rows = model(0, vocab).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=top_k,
        max_new_tokens=max_new,
        eos_token_id=EOS,
        pad_token_id=EOS,
        custom_generate=custom,
        **options,
    )
    return rows[:, len(PROMPT) :].view(draws, num_beams, -1)


def count(rows: torch.Tensor) -> Counter[tuple[Tokens, ...]]:
    return Counter(tuple(_until_eos(row) for row in rows_of_draw) for rows_of_draw in rows.tolist())


def _until_eos(tokens: list[int]) -> Tokens:
    if tokens and all(token == EOS for token in tokens):
        return (EOS,)
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def merged(law: dict[tuple[Tokens, ...], float]) -> dict[tuple[Tokens, ...], float]:
    """The law of what can be seen: a missing sequence is padding alone, as is an immediate end."""
    seen: dict[tuple[Tokens, ...], float] = defaultdict(float)
    for sequences, chance in law.items():
        seen[tuple(tokens or (EOS,) for tokens in sequences)] += chance
    assert abs(sum(seen.values()) - 1.0) < 1e-9
    return dict(seen)


@pytest.mark.parametrize(
    ("num_beams", "vocab", "max_new", "gamma", "draft_width", "drafter", "law", "top_k"),
    [
        (1, 6, 3, 2, 1, "good", "distinct", 0),  # plain speculative sampling (Leviathan et al. 2023)
        (2, 5, 3, 2, 2, "good", "distinct", 0),
        (2, 5, 3, 3, 4, "disjoint", "distinct", 3),
        (2, 5, 3, 2, 4, "same", "replacement", 0),
        (2, 5, 3, 2, 3, "good", "replacement", 3),
        (3, 4, 3, 1, 6, "good", "distinct", 0),
        (3, 4, 3, 3, 5, "disjoint", "replacement", 0),
    ],
)
def test_returned_beams_follow_the_law(
    num_beams: int, vocab: int, max_new: int, gamma: int, draft_width: int, drafter: str, law: Any, top_k: int
) -> None:
    expected = slot_beam_law(next_log_probs(vocab, top_k), [num_beams] * max_new, num_beams, EOS, law == "distinct")
    rows = decode(vocab, num_beams, max_new, drafter, top_k, law=law, gamma=gamma, draft_width=draft_width)
    assert chi_square_p_value(count(rows), merged(expected)) > FALSE_ALARM


@pytest.mark.parametrize("law", ["distinct", "replacement"])
def test_joint_warping_follows_its_law(law: Any) -> None:
    """The paper's warping: top-k over all (beam, token) pairs at once."""
    expected = slot_beam_law(next_log_probs(5, 0), [2] * 3, 2, EOS, law == "distinct", joint_top_k=4)
    rows = decode(5, 2, 3, "good", top_k=4, law=law, warping="joint", gamma=2, draft_width=3)
    assert chi_square_p_value(count(rows), merged(expected)) > FALSE_ALARM


@pytest.mark.parametrize("widths", [(1, 2, 2), (2, 1, 2), (3, 2, 3)])
@pytest.mark.parametrize("drafter", ["good", "disjoint"])
def test_widths_fixed_in_advance_give_the_law_of_that_schedule(widths: tuple[int, ...], drafter: str) -> None:
    """The last layer is never drafted, so it has all beams."""
    num_beams = widths[-1]
    expected = slot_beam_law(next_log_probs(4, 0), widths, num_beams, EOS)
    policy = Scheduled(widths, draft_width=4)
    rows = decode(4, num_beams, 3, drafter, policy=policy, width_mode="dynamic")
    assert chi_square_p_value(count(rows), merged(expected)) > FALSE_ALARM


class LayerLaws:
    """An observer that counts every layer's draws, by what they depend on: the live beams and the width."""

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, int], Counter[tuple[int, ...]]] = defaultdict(Counter)
        self.widths: Counter[int] = Counter()

    def __call__(self, record: BlockRecord) -> None:
        beams = record.start
        live = [tuple(tokens[len(PROMPT) :]) for tokens in beams.sequences_LT.tolist()]
        for outcome in record.verification.layers:
            drawn = outcome.selection.drawn
            pairs = list(zip(drawn.parents_K.tolist(), drawn.tokens_K.tolist(), strict=True))
            self.seen[tuple(live), outcome.width][tuple(sorted(self._flat(live, pairs)))] += 1
            self.widths[outcome.width] += outcome.drafted
            chosen = outcome.selection.live
            steps = zip(chosen.parents_K.tolist(), chosen.tokens_K.tolist(), strict=True)
            live = [(*live[parent], token) for parent, token in steps]

    def _flat(self, live: list[Tokens], pairs: list[tuple[int, int]]) -> list[int]:
        return [parent * 10 + token for parent, token in pairs]

    def p_value(self, vocab: int) -> float:
        """Of all layers together: sums of chi-square statistics over the conditions seen often enough."""
        log_probs, statistic, freedom = next_log_probs(vocab, 0), 0.0, 0
        for (live, width), counts in self.seen.items():
            total = sum(counts.values())
            scores = {}
            for index, tokens in enumerate(live):
                path = sum(log_probs(tokens[:n])[token] for n, token in enumerate(tokens))
                scores.update({index * 10 + t: path + lp for t, lp in enumerate(log_probs(tokens))})
            keys = list(scores)
            probs = torch.softmax(torch.tensor([scores[key] for key in keys], dtype=torch.float64), 0).tolist()
            law = slots_law(probs, width, True)
            cells = {tuple(sorted(keys[i] for i in drawn)): total * chance for drawn, chance in law.items()}
            big = {key: expected for key, expected in cells.items() if expected >= 5.0}
            rest_expected = total - sum(big.values())
            rest_seen = total - sum(counts[key] for key in big)
            if len(big) < 2:
                continue
            statistic += sum((counts[key] - expected) ** 2 / expected for key, expected in big.items())
            freedom += len(big) - 1
            if rest_expected >= 5.0:
                statistic += (rest_seen - rest_expected) ** 2 / rest_expected
                freedom += 1
        assert freedom > 20
        return float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_paper_widths_keep_the_law_of_every_layer(threshold: float) -> None:
    """Given the live beams and the width, a layer's draws have that width's law: it looks at no candidate."""
    laws = LayerLaws()
    decode(5, 3, 4, "good", observer=laws, width_mode="dynamic", threshold=threshold, gamma=3, draft_width=4)
    assert len(laws.widths) >= 2
    assert laws.p_value(5) > FALSE_ALARM


def test_a_width_that_peeks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a layer keeps as many beams as its first candidate suggests."""
    original = rejection._verify_layer

    def peeking(config: Any, layer: Any, *rest: Any) -> Any:
        width = 1 if int(layer.candidates.tokens_K[0]) % 2 else 2
        monkeypatch.setattr(rejection, "layer_width", lambda config, plan, joint: width)
        return original(config, layer, *rest)

    monkeypatch.setattr(rejection, "_verify_layer", peeking)
    laws = LayerLaws()
    decode(5, 3, 4, "good", observer=laws, width_mode="dynamic", gamma=3, draft_width=4)
    assert laws.p_value(5) < FALSE_ALARM


def keep_shift(slot: Any, index: int) -> None:
    """The planted fault: the residual is not reset after an acceptance."""
    shift = slot.shift
    _ACCEPT(slot, index)
    slot.shift = shift
    slot.mass = slot._mass()


_ACCEPT = acceptance._OpenSlot.accept


def test_planted_faults_are_noticed_by_the_engines_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[tuple[Any, str, Any]] = [
        (acceptance, "left_masses", lambda joint, index_M, q_M: [1.0] * len(q_M)),
        (acceptance._OpenSlot, "accept", keep_shift),
    ]
    for owner, name, fault in faults:
        laws = LayerLaws()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            decode(6, 2, 3, "good", observer=laws, gamma=1, draft_width=6)
        assert laws.p_value(6) < FALSE_ALARM, name


@pytest.mark.parametrize("num_beams", [1, 2])
def test_coupled_dynamic_is_the_same_text_whatever_drafts(num_beams: int) -> None:
    """With widths fixed in advance, coupled verification draws by the noise alone."""
    widths = (1, num_beams, 1, num_beams)
    outputs = [
        decode(5, num_beams, 4, drafter, draws=200, verification="coupled", policy=policy, width_mode="dynamic")
        for drafter, policy in (("good", Scheduled(widths, 3)), ("disjoint", Scheduled(widths, 5)))
    ]
    assert torch.equal(outputs[0], outputs[1])
