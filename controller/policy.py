"""The learned width policy: draft a layer while it is worth more than it costs (design §6).

Decoding is a renewal process: blocks follow each other, each advances some layers and takes some time. The rate of
the whole is best when every block maximises (expected layers) - (best rate) x (expected time), so a further layer is
drafted while the layers it is expected to add exceed the rate times the milliseconds it adds. The rate is the policy's
own running average. What might follow a layer is left out: replays showed no gain from looking further ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from beamwise.decoding.errors import ConfigError
from beamwise.decoding.widths import BlockPlanner, LayerPlan, LayerView, Question

from .frailty import PromptFrailty
from .habit import Habits
from .latency import LatencyProfile
from .ledger import Ledger
from .predictor import WidthPredictor

_Table = TypeVar("_Table", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class Choice:
    """A layer's best widths.

    Attributes:
        cell: row (width) and column (draft width) of the best plan.
        value: layers gained in expectation, net of the target's time; may be negative.
        values_WJ: that of every plan, float (W, J).
    """

    cell: tuple[int, int]
    value: float
    values_WJ: np.ndarray


class LearnedWidth:
    """Plans blocks with a `WidthPredictor` and a latency profile; a `WidthPolicy`.

    At each layer the prior network decides whether running the draft can pay; the full network then chooses the draft
    width, or stops. On a GPU, where decisions of the host are waits, the draft runs without asking the prior.

    In exact mode every beam must be covered. In dynamic mode the policy also chooses how many beams to keep: a layer of
    w beams is worth 1 - quality * (1/w - 1/W) / (1 - 1/W) layers of W beams, since the likelihood of the result grows
    with the width in about this way. (A threshold on the probability, as in the paper, keeps the narrowest width
    wherever the cheapest draft reaches it: replayed, it gave no choice between speed and quality.)

    What a prompt is like beyond the features, its own layers tell (`frailty`). Where asking the networks gains less
    than it takes, the plan that is best on average is followed without (`habit`).

    The policy keeps running averages, so its plans depend on what it decoded before; in exact mode the output does not.

    Args:
        predictor: the networks, with the weights that they have now; they follow the features to whatever device
            decodes.
        profile: of the device that decodes.
        mode: ``"exact"`` or ``"dynamic"``.
        quality: dynamic mode's price of narrow layers, from 0 (only speed counts) to 1 (one beam is worth nothing).
        min_width: dynamic mode's least width.
        max_gamma: most layers in one block.
        max_draft_width: widest layer; None allows every edge of the predictor.
        max_beams: most beams that it plans for; None allows what the predictor was made for.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        predictor: WidthPredictor,
        profile: LatencyProfile,
        mode: Literal["exact", "dynamic"] = "exact",
        quality: float = 0.5,
        min_width: int = 1,
        max_gamma: int = 8,
        max_draft_width: int | None = None,
        max_beams: int | None = None,
    ) -> None:
        if mode not in ("exact", "dynamic"):
            raise ConfigError(f"mode is '{mode}': use exact or dynamic")
        if not 0.0 <= quality <= 1.0:
            raise ConfigError(f"quality is {quality}: it must lie between 0 (speed) and 1 (wide layers)")
        if min_width < 1 or max_gamma < 1:
            raise ConfigError(f"min_width is {min_width} and max_gamma {max_gamma}: both must be at least 1")
        edges = predictor.config.edges
        self.draft_widths = [edge for edge in edges if max_draft_width is None or edge <= max_draft_width]
        if not self.draft_widths:
            raise ConfigError(f"max_draft_width is {max_draft_width}: the predictor's smallest is {edges[0]}")
        self.predictor = predictor.eval()
        self.profile = profile
        self.mode = mode
        self.quality = quality
        self.min_width = min_width
        self.max_gamma = max_gamma
        self.max_beams = min(max_beams or predictor.config.max_width, predictor.config.max_width)
        self._ledgers: dict[int, Ledger] = {}
        self._known_costs: dict[int, np.ndarray] = {}
        self._known_worths: dict[int, np.ndarray] = {}
        self._copies = {next(predictor.parameters()).device: self.predictor}
        self._host_nets = {"prior": predictor.prior.on_host(), "full": predictor.full.on_host()}
        self._target_ms = [profile.target(tokens) for tokens in range(max_gamma * edges[-1] + 2 * 64)]
        self._draft_ms = [profile.draft(tokens) for tokens in range(edges[-1] + 1)]

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `WidthPolicy.start_block`.

        Raises:
            ConfigError: more beams than the predictor was trained for.
        """
        if num_beams > self.max_beams:
            raise ConfigError(
                f"num_beams is {num_beams}, but this controller has learned from at most {self.max_beams}: use fewer "
                "beams, fixed widths, or train a controller on traces of as many"
            )
        return _LearnedPlanner(self, self._ledgers.setdefault(num_beams, Ledger()))

    def target_ms(self, tokens: int) -> float:
        """Milliseconds of a target forward, from a table."""
        return self._target_ms[tokens] if tokens < len(self._target_ms) else self.profile.target(tokens)

    def draft_ms(self, tokens: int) -> float:
        """Milliseconds of a draft forward and of drawing its layer, from a table."""
        forward = self._draft_ms[tokens] if tokens < len(self._draft_ms) else self.profile.draft(tokens)
        return forward + self.profile.layer_ms

    def widths(self, num_beams: int) -> range:
        """Numbers of beams that a layer may keep: all of them alone in exact mode."""
        return range(num_beams if self.mode == "exact" else min(self.min_width, num_beams), num_beams + 1)

    def choose(self, probs_WJ: np.ndarray, num_beams: int, tokens: int, reach: float, rate: float) -> Choice:
        """The best widths of a layer.

        Args:
            probs_WJ: float (W, J), success probabilities at `widths` and `draft_widths`.
            num_beams: beams asked for.
            tokens: in the target's forward so far.
            reach: probability that the layer is reached.
            rate: layers per millisecond.
        """
        values = probs_WJ * (reach * self._worths(num_beams)) - rate * self._costs(tokens)
        cell = divmod(int(values.argmax()), values.shape[1])
        return Choice(cell, float(values[cell]), values)

    def _costs(self, tokens: int) -> np.ndarray:
        """Milliseconds that each draft width adds to a target forward of so many tokens, float (J,); kept."""
        if tokens not in self._known_costs:
            before = self.target_ms(tokens)
            costs = [self.target_ms(tokens + draft_width) - before for draft_width in self.draft_widths]
            self._known_costs[tokens] = np.array(costs)
        return self._known_costs[tokens]

    def _worths(self, num_beams: int) -> np.ndarray:
        """What a layer of each width is worth, float (W, 1); kept."""
        if num_beams not in self._known_worths:
            worths = [[self._worth(width, num_beams)] for width in self.widths(num_beams)]
            self._known_worths[num_beams] = np.array(worths)
        return self._known_worths[num_beams]

    def _worth(self, width: int, num_beams: int) -> float:
        """Layers of ``num_beams`` beams that a layer of ``width`` beams is worth."""
        if width == num_beams:
            return 1.0
        return 1.0 - self.quality * (1.0 / width - 1.0 / num_beams) / (1.0 - 1.0 / num_beams)

    def probs(self, features: torch.Tensor, num_beams: int, stage: Literal["prior", "full"]) -> np.ndarray:
        """Success probabilities of one layer, float32 (W, J), from its features (F,), computed on the host.

        W and J count `widths` and `draft_widths`.
        """
        return self._allowed(self._host_nets[stage].success_probs(features.cpu().numpy(), num_beams), num_beams)

    @torch.inference_mode()
    def probs_on_device(self, features: torch.Tensor, num_beams: int) -> torch.Tensor:
        """The full network's, on the device of the features."""
        return self._allowed(self._on(features.device).success_probs(features.unsqueeze(0))[0], num_beams)

    def _allowed(self, probs_WJ: _Table, num_beams: int) -> _Table:
        """The plans that may be chosen, of a table over all widths and edges."""
        return probs_WJ[self.widths(num_beams)[0] - 1 : num_beams, : len(self.draft_widths)]

    def _on(self, device: torch.device) -> WidthPredictor:
        """The predictor on a device; copied there once."""
        if device not in self._copies:
            self._copies[device] = copy.deepcopy(self.predictor).to(device)
        return self._copies[device]


class _LearnedPlanner:
    """Plans one block."""

    def __init__(self, policy: LearnedWidth, ledger: Ledger) -> None:
        self.policy = policy
        self.ledger = ledger
        self.frailty = PromptFrailty()
        self.habits = Habits(ledger.habits)
        self.reach = 1.0
        self.tokens = 0

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if not self._may_go_on(view):
            return None
        if self.habits.at(view.layer).rests():
            return self._as_ever(view)
        policy, frailty = self.policy, self.frailty.prior
        prior_WJ = policy.probs(view.context_features, view.num_beams, "prior")
        expected_WJ = frailty.applied(prior_WJ)
        hope = self._choose(view, expected_WJ)
        if hope.value <= self._price(view) and not (view.layer == 0 and self.frailty.look()):
            self._learn(view, hope, expected_WJ, asks=1, drafted=False)
            return None
        full_WJ = policy.probs(view.features, view.num_beams, "full")
        frailty.update(float(prior_WJ[hope.cell]), float(full_WJ[hope.cell]))
        return self._settle(view, full_WJ, asks=2)

    def ask(self, view: LayerView) -> Question | None:
        """The choice of the full network alone: asking the prior first would add a wait to every layer."""
        if not self._may_go_on(view):
            return None
        if self.habits.at(view.layer).rests():
            plan = self._as_ever(view)
            return None if plan is None else Question((), plan.draft_width, lambda _: plan)
        probs_WJ = self.policy.probs_on_device(view.features, view.num_beams)

        def decide(values: Sequence[list[float]]) -> LayerPlan | None:
            return self._settle(view, np.array(values[0]).reshape(tuple(probs_WJ.shape)), asks=1)

        return Question([probs_WJ], self.policy.draft_widths[-1], decide)

    def _may_go_on(self, view: LayerView) -> bool:
        """Whether a layer that is certain to be covered would be worth the draft's forward."""
        policy, ledger = self.policy, self.ledger
        if view.layer == 0:
            self.frailty = view.notes.setdefault("frailty", self.frailty)
            self.habits = view.notes.setdefault("habits", self.habits)
            self.frailty.begin(view.outcomes)
            self.tokens = view.num_parents
            ledger.begin(policy.target_ms(self.tokens) + policy.profile.block_ms)
        return view.layer < policy.max_gamma and self.reach > self._price(view)

    def _settle(self, view: LayerView, full_WJ: np.ndarray, asks: int) -> LayerPlan | None:
        """The plan by the full network; the draft's forward is paid for already."""
        choice = self._choose(view, full_WJ)
        self._learn(view, choice, full_WJ, asks, drafted=True)
        if choice.value <= 0.0:
            self.ledger.add(0.0, self.policy.draft_ms(view.num_parents))
            return None
        return self._take(view, choice.cell, float(full_WJ[choice.cell]))

    def _as_ever(self, view: LayerView) -> LayerPlan | None:
        """The plan that is best by the mean of the answers so far, without an ask."""
        probs_WJ = self.habits.at(view.layer).mean_probs
        choice = self._choose(view, probs_WJ)
        return (
            None if choice.value <= self._price(view) else self._take(view, choice.cell, float(probs_WJ[choice.cell]))
        )

    def _take(self, view: LayerView, cell: tuple[int, int], promised: float) -> LayerPlan:
        """Add a layer, which a network promised to be covered with this probability."""
        policy, before = self.policy, self.policy.target_ms(self.tokens)
        width, draft_width = policy.widths(view.num_beams)[cell[0]], policy.draft_widths[cell[1]]
        self.frailty.planned.append(promised)
        self.reach *= self.frailty.full.applied_to(promised)
        self.tokens += draft_width
        self.ledger.add(self.reach, policy.draft_ms(view.num_parents) + policy.target_ms(self.tokens) - before)
        return LayerPlan(width, draft_width)

    def _choose(self, view: LayerView, probs_WJ: np.ndarray) -> Choice:
        """By probabilities of the full network, or by those that the prior expects of it."""
        probs_WJ = self.frailty.full.applied(probs_WJ)
        return self.policy.choose(probs_WJ, view.num_beams, self.tokens, self.reach, self.ledger.rate)

    def _price(self, view: LayerView) -> float:
        """Layers that the draft's forward takes the time of."""
        return self.ledger.rate * self.policy.draft_ms(view.num_parents)

    def _learn(self, view: LayerView, choice: Choice, probs_WJ: np.ndarray, asks: int, drafted: bool) -> None:
        """What asking has gained here, and what every plan would have gained without."""
        price, asking_ms = self._price(view), asks * self.policy.profile.ask_ms
        gained = (max(choice.value, 0.0) - price if drafted else 0.0) - self.ledger.rate * asking_ms
        self.habits.at(view.layer).learn(gained, choice.values_WJ - price, probs_WJ)
        self.ledger.add(0.0, asking_ms)
