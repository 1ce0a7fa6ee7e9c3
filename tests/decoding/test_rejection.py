"""One layer of rejection verification: the law of its slots, whatever the draft is.

Seeds are fixed; over the choice of the seed a correct program fails each law test with probability 1e-3. The faults
planted below must fail the same tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from beamwise.decoding import acceptance
from beamwise.decoding.acceptance import accept_candidates, draw_slots
from beamwise.decoding.joint import Joint, make_joint
from tests.decoding.enumeration import chi_square_p_value, slots_law

FALSE_ALARM = 1e-3
DRAWS = 6000
P = np.array([0.30, 0.05, 0.0, 0.22, 0.13, 0.12, 0.10, 0.08])
GOOD = np.array([0.25, 0.10, 0.05, 0.20, 0.15, 0.10, 0.10, 0.05])
BAD = np.array([0.02, 0.60, 0.10, 0.04, 0.20, 0.0, 0.01, 0.03])
DISJOINT = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])

Widths = Callable[[list[int]], int]


def draw_layer(q: np.ndarray, m: int, width: int | Widths, distinct: bool, rng: np.random.Generator) -> tuple[int, ...]:
    """One verified layer over 8 outcomes: candidates 0..5 have live parents and columns, 6 has a live parent but no
    column (q = 0 there is enforced), 7's parent is not live for q (p's share of it lies outside the draft)."""
    candidates = [int(x) for x in rng.choice(8, size=min(m, int((q > 0).sum())), replace=False, p=q)]
    joint = Joint(torch.tensor(P[:6]), torch.tensor(q[:6]), float(P[6:].sum()), float(q[6:].sum()), 6, 0.0)
    count = width if isinstance(width, int) else width(candidates)
    index_M = [x if x < 6 else -1 for x in candidates]
    offered = accept_candidates(joint, index_M, [float(q[x]) for x in candidates], list(rng.random(m)), count, distinct)
    slots = [candidates[number] for number in offered.accepted]
    if offered.residual_N is None:
        return tuple(sorted(slots))
    residual = torch.cat([offered.residual_N, torch.tensor(P[6:])])
    slots += draw_slots(residual, [rng.random()], distinct)
    rest = torch.tensor(P)
    if distinct:
        rest[slots] = 0.0
    slots += draw_slots(rest, list(rng.random(count - len(slots))), distinct)
    return tuple(sorted(slots))


def observe(q: np.ndarray, m: int, width: int | Widths, distinct: bool, seed: int = 0) -> Counter[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return Counter(draw_layer(q, m, width, distinct, rng) for _ in range(DRAWS))


@pytest.mark.parametrize("q", [GOOD, BAD, DISJOINT], ids=["good", "bad", "disjoint"])
@pytest.mark.parametrize(("width", "m"), [(1, 1), (1, 4), (2, 2), (2, 6), (3, 3), (3, 6)])
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "replacement"])
def test_slots_follow_their_law(q: np.ndarray, width: int, m: int, distinct: bool) -> None:
    law = slots_law(P.tolist(), width, distinct)
    assert chi_square_p_value(observe(q, m, width, distinct), law) > FALSE_ALARM


def test_distinct_slots_end_with_the_support() -> None:
    joint = Joint(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.4, 0.4, 0.2]), 0.0, 0.0, 3, 0.0)
    seen = set()
    for seed in range(50):
        uniforms = list(np.random.default_rng(seed).random(3))
        offered = accept_candidates(joint, [2, 0, 1], [0.2, 0.4, 0.4], uniforms, 3, distinct=True)
        assert set(offered.accepted) <= {1, 2}
        rest = draw_slots(torch.tensor([0.5, 0.5, 0.0]), uniforms, distinct=True)
        assert sorted(rest) == [0, 1]
        seen.add((len(offered.accepted), offered.residual_N is None))
    assert (2, True) in seen


def test_equal_distributions_accept_everything() -> None:
    """Rounding must not turn p = q into a rejection with nothing left."""
    probs = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0)
    joint = Joint(probs, probs.clone(), 0.0, 0.0, 50, 0.0)
    offered = accept_candidates(joint, [7], [float(probs[7])], [1.0 - 2.0**-33], 1, distinct=True)
    assert offered.accepted == [0]


def test_q_that_is_spent_keeps_its_precision() -> None:
    """Nearly all of q is drawn with the first candidate; what is left is renormalised without cancelling."""
    q = torch.tensor([1.0 - 3e-17, 2e-17, 1e-17], dtype=torch.float64)
    joint = Joint(torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64), q, 0.0, 0.0, 3, 0.0)
    masses = acceptance.left_masses(joint, [0, 1], q[:2].tolist())
    assert masses[1] == pytest.approx(3e-17, rel=1e-9)


def test_joint_puts_both_sides_together() -> None:
    """Two of three parents are live, in another order; the draft knows three of five tokens."""
    generator = torch.Generator().manual_seed(1)
    p_UV = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    p_UV /= p_UV.sum()
    log_weights = torch.randn(3, 3, generator=generator)
    tokens = torch.tensor([4, 0, 2])
    joint = make_joint(p_UV, log_weights, tokens, torch.tensor([2, 0]))
    q = torch.softmax(log_weights.view(-1).double(), 0).view(3, 3)
    assert torch.allclose(joint.q_N.view(2, 3), q[[2, 0]], atol=1e-6)
    assert torch.equal(joint.p_N.view(2, 3), p_UV[:, tokens])
    assert joint.q_rest == pytest.approx(float(q[1].sum()), abs=1e-6)
    assert joint.p_rest == pytest.approx(float(p_UV[:, [1, 3]].sum()))


# Negative controls: the tests above notice each of these faults.


def test_unnormalised_q_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published code's fault: candidates are drawn without replacement, q is not renormalised."""
    monkeypatch.setattr(acceptance, "left_masses", lambda joint, index_M, q_M: [1.0] * len(q_M))
    assert chi_square_p_value(observe(BAD, 6, 2, True), slots_law(P.tolist(), 2, True)) < FALSE_ALARM
    assert chi_square_p_value(observe(BAD, 6, 2, False), slots_law(P.tolist(), 2, False)) < FALSE_ALARM


def test_a_residual_that_is_not_reset_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = acceptance._OpenSlot.accept

    def keep_shift(slot: acceptance._OpenSlot, index: int) -> None:
        shift = slot.shift
        original(slot, index)
        slot.shift = shift
        slot.mass = slot._mass()

    monkeypatch.setattr(acceptance._OpenSlot, "accept", keep_shift)
    for distinct in (True, False):
        law = slots_law(P.tolist(), 3, distinct)
        assert chi_square_p_value(observe(BAD, 6, 3, distinct), law) < FALSE_ALARM


def test_a_width_chosen_after_the_candidates_is_noticed() -> None:
    """Widths 1 and 2, once by a coin and once by the first candidate, with the same odds: the coin keeps the law."""
    odds = float(GOOD[[0, 3]].sum())
    one, two = slots_law(P.tolist(), 1, True), slots_law(P.tolist(), 2, True)
    law = {**{key: odds * chance for key, chance in one.items()}, **{k: (1 - odds) * c for k, c in two.items()}}
    coin = np.random.default_rng(7)
    honest = observe(GOOD, 4, lambda _: 1 if coin.random() < odds else 2, True)
    peeking = observe(GOOD, 4, lambda candidates: 1 if candidates[0] in (0, 3) else 2, True)
    assert chi_square_p_value(honest, law) > FALSE_ALARM
    assert chi_square_p_value(peeking, law) < FALSE_ALARM


def test_widening_a_layer_that_failed_is_noticed() -> None:
    """Filling a recovered layer up to more beams than were decided before also chooses widths by the candidates."""
    rng = np.random.default_rng(3)
    widened: Counter[tuple[int, ...]] = Counter()
    for _ in range(DRAWS):
        state = rng.bit_generator.state
        joint = Joint(torch.tensor(P[:6]), torch.tensor(BAD[:6]), float(P[6:].sum()), float(BAD[6:].sum()), 6, 0.0)
        x = int(rng.choice(8, p=BAD))
        taken = accept_candidates(joint, [x if x < 6 else -1], [float(BAD[x])], [rng.random()], 1, True).accepted
        rng.bit_generator.state = state
        slots = draw_layer(BAD, 1, 1, True, rng)
        if not taken:
            rest = torch.tensor(P)
            rest[list(slots)] = 0.0
            slots = tuple(sorted((*slots, *draw_slots(rest, [rng.random()], True))))
        widened[slots] += 1
    share = sum(count for slots, count in widened.items() if len(slots) == 1) / DRAWS
    one, two = slots_law(P.tolist(), 1, True), slots_law(P.tolist(), 2, True)
    law = {**{key: share * chance for key, chance in one.items()}, **{k: (1 - share) * c for k, c in two.items()}}
    assert chi_square_p_value(widened, law) < FALSE_ALARM
