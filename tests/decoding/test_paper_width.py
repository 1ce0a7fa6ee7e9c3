"""The paper's acceptance probabilities against simulation, and the width rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from beamwise.decoding.acceptance import accept_candidates
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.joint import Joint
from beamwise.decoding.paper_width import PaperWidth, accept_probabilities
from tests.conftest import make_tiny_llama

TRIALS = 4000


def random_pair(rng: np.random.Generator, size: int = 12) -> tuple[np.ndarray, np.ndarray]:
    p = rng.dirichlet(np.full(size, 0.5))
    q = 0.7 * p * np.exp(rng.normal(0.0, 0.7, size)) + 0.3 * rng.dirichlet(np.full(size, 0.5))
    return p, q / q.sum()


def joint_of(p: np.ndarray, q: np.ndarray) -> Joint:
    """The last two outcomes stand for p outside the draft's columns and q at dead parents."""
    return Joint(torch.tensor(p[:-2]), torch.tensor(q[:-2]), float(p[-2:].sum()), float(q[-2:].sum()), len(p) - 2, 0.0)


def simulate_paper(p: np.ndarray, q: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers accepted in the paper's process: independent candidates, fixed q, residual reset after acceptance."""
    p_live, q_all = np.append(p[:-2], p[-2:].sum()), np.append(q[:-2], [0.0, q[-2:].sum()])
    p_all = np.append(p_live, 0.0)
    residual = np.tile(p_all, (TRIALS, 1))
    accepted = np.zeros(TRIALS, dtype=int)
    for _ in range(m):
        x = rng.choice(len(q_all), size=TRIALS, p=q_all)
        ok = rng.random(TRIALS) * q_all[x] < residual[np.arange(TRIALS), x]
        left = np.maximum(residual - q_all, 0.0)
        left /= left.sum(1, keepdims=True)
        residual = np.where(ok[:, None], p_all, left)
        accepted += ok
    return accepted


def test_probabilities_match_the_papers_process() -> None:
    """30 random pairs, m = 6, k = 1..4: 120 frequencies within 4 standard errors, and 3 for all but 3 of them."""
    rng = np.random.default_rng(0)
    beyond = 0
    for _ in range(30):
        p, q = random_pair(rng)
        accepted = simulate_paper(p, q, 6, rng)
        for k, chance in enumerate(accept_probabilities(joint_of(p, q), 6, 4), start=1):
            error = max(np.sqrt(chance * (1 - chance) / TRIALS), 1e-3)
            off = abs(float((accepted >= k).mean()) - chance) / error
            assert off < 4.0
            beyond += off > 3.0
    assert beyond <= 3  # expected 0.3 of 120


@pytest.mark.parametrize(("distinct", "bound"), [(True, 0.1), (False, 0.25)])
def test_the_recursion_is_close_where_candidates_are_distinct(distinct: bool, bound: float) -> None:
    """What Beamwise draws differs from the recursion's process; docs/exactness.md quotes how far (see `measure`)."""
    mean, _ = measure(distinct, pairs=12, trials=400)
    assert mean < bound


def measure(distinct: bool, pairs: int, trials: int, m: int = 6, seed: int = 1) -> tuple[float, float]:
    """Mean and largest distance between the recursion and our process, over k = 1..4 and random pairs."""
    rng = np.random.default_rng(seed)
    distances = []
    for _ in range(pairs):
        p, q = random_pair(rng)
        joint, live = joint_of(p, q), len(p) - 2
        counts = np.zeros(trials)
        for trial in range(trials):
            candidates = rng.choice(len(q), size=m, replace=False, p=q)
            places = [int(x) if x < live else -1 for x in candidates]
            uniforms = rng.random(m).tolist()
            counts[trial] = len(
                accept_candidates(joint, places, q[candidates].tolist(), uniforms, 4, distinct).accepted
            )
        for k, chance in enumerate(accept_probabilities(joint, m, 4), start=1):
            distances.append(abs(float((counts >= k).mean()) - chance))
    return float(np.mean(distances)), float(np.max(distances))


def test_extremes() -> None:
    same = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert accept_probabilities(Joint(same, same, 0.0, 0.0, 3, 0.0), 3, 3) == pytest.approx([1.0, 1.0, 1.0])
    disjoint = Joint(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.0, 0.0, 2, 0.0)
    assert accept_probabilities(disjoint, 5, 2) == pytest.approx([0.0, 0.0])
    assert accept_probabilities(disjoint, 0, 2) == [0.0, 0.0]


def test_the_widest_that_reaches_the_threshold() -> None:
    joint = joint_of(*random_pair(np.random.default_rng(5)))
    chances = accept_probabilities(joint, 6, 4)
    assert chances == sorted(chances, reverse=True)
    for threshold in (0.05, 0.3, 0.6, 0.9, 0.99):
        width = PaperWidth(3, 6, threshold).choose(joint, 6, 4)
        assert all(chance >= threshold for chance in chances[:width])
        assert width == 4 or chances[width] < threshold


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"threshold": 1.0}, {"gamma": -1}, {"draft_width": 0}])
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PaperWidth(**{"gamma": 3, "draft_width": 4, **settings})  # type: ignore[arg-type]


def test_carrying_one_beam_keeps_one_path_between_blocks() -> None:
    """The paper's memory variant: between blocks there is one live beam, inside them there are several."""
    between, inside = [], []

    def observer(record: object) -> None:
        between.append(len(record.row.live))  # type: ignore[attr-defined]
        inside.extend(len(layer.selection.live) for layer in record.verification.layers)  # type: ignore[attr-defined]

    target, draft = make_tiny_llama(0, vocab_size=20), make_tiny_llama(1, vocab_size=20)
    beams = SpeculativeBeams(
        draft, "model", gamma=2, seed=0, observer=observer, width_mode="dynamic", min_width=2, carry_beams=1
    )
    target.generate(torch.tensor([[2, 3]]), num_beams=3, do_sample=True, max_new_tokens=12, custom_generate=beams)
    assert set(between[:-1]) == {1}
    assert max(inside) > 1
