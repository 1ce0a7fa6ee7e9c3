"""Asking only where it pays: plans that are good enough are followed without, and asked about again."""

from __future__ import annotations

import dataclasses
from itertools import cycle

import numpy as np
import pytest

from beamwise.controller.habit import Habit, Habits
from beamwise.controller.latency import LatencyProfile
from beamwise.controller.policy import LearnedWidth
from beamwise.decoding.widths import AskingPlanner
from tests.controller.test_policy import HOPELESS, PROFILE, STEEP, SURE, FixedNet, Views, constant_predictor, plan

ASKED = dataclasses.replace(PROFILE, ask_ms=0.5)


LIKELY = [[0.7, 0.75, 0.8]] * 2


class Answers(FixedNet):
    """A network on the host whose answers take turns."""

    def __init__(self, *tables: list[list[float]]) -> None:
        self.asked = 0
        self._turns = cycle([np.array(rows, dtype=np.float32) for rows in tables])

    def success_probs(self, features: np.ndarray, num_beams: int) -> np.ndarray:
        self.asked += 1
        return next(self._turns)[:num_beams]


def decode(profile: LatencyProfile, *tables: list[list[float]], blocks: int) -> tuple[int, list[int]]:
    """(asks, layers of each block) of a prompt, where the full network's answers take turns; one layer at most."""
    predictor, answers = constant_predictor(SURE[0], SURE), Answers(*tables)
    predictor.full.on_host = lambda: answers  # type: ignore[assignment,return-value]
    policy, views = LearnedWidth(predictor, profile, max_gamma=1), Views(2)
    depths = [len(plan(policy, views)) for _ in range(blocks)]
    return answers.asked, depths


def test_the_same_answer_again_and_again_is_no_longer_asked_for() -> None:
    for table, layers in ((SURE, 1), (HOPELESS, 0)):
        asked, depths = decode(ASKED, table, blocks=100)
        assert depths == [layers] * 100
        assert asked < 25


def test_answers_that_differ_are_worth_their_asks() -> None:
    asked, depths = decode(STEEP, SURE, HOPELESS, blocks=100)
    assert asked > 75
    assert 40 <= sum(depths) <= 60


def test_asks_become_ever_rarer() -> None:
    habit, asked = Habit(), []
    for block in range(60):
        if not habit.rests():
            asked.append(block)
            habit.learn(-0.1, np.array([[-0.5, -0.2]]), np.array([[0.1, 0.2]]))
    assert asked == [0, 1, 4, 9, 18, 27, 36, 45, 54]
    habit.learn(1.0, np.array([[0.1, 0.2]]), np.array([[0.5, 0.6]]))  # and often again, once they are worth it
    assert not habit.rests()


def test_the_mean_answer() -> None:
    habit = Habit()
    habit.learn(0.3, np.array([[0.4, 0.1], [0.0, 0.2]]), np.array([[0.9, 0.9], [0.1, 0.5]]))
    habit.learn(0.3, np.array([[-0.4, 0.1], [0.0, 0.3]]), np.array([[0.1, 0.9], [0.1, 0.7]]))
    assert habit.mean_probs[1, 1] == pytest.approx((0.8 * 0.5 + 0.7) / 1.8)
    assert habit.mean_probs.shape == (2, 2)


def test_a_plan_that_no_longer_works_is_left_before_the_next_ask() -> None:
    """Outcomes count at once: no block drafts in vain until the networks are asked again."""
    policy, views = LearnedWidth(constant_predictor(LIKELY[0], LIKELY), STEEP, max_gamma=1), Views(2)
    for _ in range(30):
        assert plan(policy, views)
    views.outcomes = (False,)
    depths = [len(plan(policy, views)) for _ in range(30)]
    assert sum(depths[-10:]) <= 3


def test_a_prompt_starts_from_the_others() -> None:
    everyone = Habits()
    first = Habits(everyone)
    assert first.at(2).asked == 0.0
    for _ in range(3):
        first.at(2).learn(0.5, np.array([[0.5]]), np.array([[0.8]]))
    second = Habits(everyone).at(2)
    assert second.asked == pytest.approx(1.0)
    assert second.mean_probs == pytest.approx(np.array([[0.8]]))
    assert Habits(everyone).at(1).asked == 0.0


def test_nothing_is_read_from_the_device_for_a_habit() -> None:
    policy, views = LearnedWidth(constant_predictor(SURE[0], SURE), ASKED, max_gamma=1), Views(2)
    reads, widths = 0, set()
    for _ in range(50):
        planner = policy.start_block(2)
        assert isinstance(planner, AskingPlanner)
        question = planner.ask(views.view(0, 2))
        assert question is not None
        chosen = question.decide([tensor.tolist() for tensor in question.tensors])
        assert chosen is not None
        reads += len(question.tensors)
        widths.add((chosen.width, chosen.draft_width))
    assert widths == {(2, 2)}
    assert reads < 15
