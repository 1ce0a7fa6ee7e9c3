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

from .latency import LatencyProfile
from .predictor import WidthPredictor
from .trust import PromptTrust

_Table = TypeVar("_Table", np.ndarray, torch.Tensor)

_MEMORY = 0.98
"""Share of the running sums that the next block keeps: the rate looks back about 50 blocks."""


@dataclass
class _Ledger:
    """Running averages of decoding with one number of beams.

    Attributes:
        layers: expected layers of past blocks, decayed.
        ms: their expected milliseconds, decayed.
    """

    layers: float = 0.0
    ms: float = 0.0

    def begin(self, ms: float) -> None:
        """A block starts: the target's forward alone gives one layer for ``ms``."""
        self.layers = _MEMORY * self.layers + 1.0
        self.ms = _MEMORY * self.ms + ms

    def add(self, layers: float, ms: float) -> None:
        """The block's plan grew."""
        self.layers += layers
        self.ms += ms

    @property
    def rate(self) -> float:
        """Layers per millisecond."""
        return self.layers / self.ms


@dataclass(frozen=True)
class Choice:
    """A layer's best widths.

    Attributes:
        width: beams to keep.
        draft_width: candidates to draft.
        success: probability that the layer is covered.
        value: layers gained in expectation, net of the target's time; may be negative.
        target_ms: what the candidates add to the target's forward.
    """

    width: int
    draft_width: int
    success: float
    value: float
    target_ms: float


class LearnedWidth:
    """Plans blocks with a `WidthPredictor` and a latency profile; a `WidthPolicy`.

    At each layer the prior network decides whether running the draft can pay; the full network then chooses the draft
    width, or stops. On a GPU, where each decision of the host is a wait, the draft runs without asking the prior.

    In exact mode every beam must be covered. In dynamic mode the policy also chooses how many beams to keep: a layer of
    w beams is worth 1 - quality * (1/w - 1/W) / (1 - 1/W) layers of W beams, since the likelihood of the result grows
    with the width in about this way. (A threshold on the probability, as in the paper, keeps the narrowest width
    wherever the cheapest draft reaches it: replayed, it gave no choice between speed and quality.)

    Where a prompt is unlike those that the networks learnt from, its own layers tell (`trust`).

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
        self._ledgers: dict[int, _Ledger] = {}
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
        return _LearnedPlanner(self, self._ledgers.setdefault(num_beams, _Ledger()))

    def target_ms(self, tokens: int) -> float:
        """Milliseconds of a target forward, from a table."""
        return self._target_ms[tokens] if tokens < len(self._target_ms) else self.profile.target(tokens)

    def draft_ms(self, tokens: int) -> float:
        """Milliseconds of a draft forward and of drawing its layer, from a table."""
        forward = self._draft_ms[tokens] if tokens < len(self._draft_ms) else self.profile.draft(tokens)
        return forward + self.profile.layer_ms

    def choose(self, probs_WJ: np.ndarray, tokens: int, reach: float, rate: float) -> Choice:
        """The best widths of a layer.

        Args:
            probs_WJ: float (W, J), success probabilities at the widths that count (one row in exact mode) and the
                predictor's edges.
            tokens: in the target's forward so far.
            reach: probability that the layer is reached.
            rate: layers per millisecond.
        """
        count = probs_WJ.shape[0]
        least = min(self.min_width, count)
        probs = probs_WJ[least - 1 :, : len(self.draft_widths)]
        before = self.target_ms(tokens)
        costs = [self.target_ms(tokens + draft_width) - before for draft_width in self.draft_widths]
        worths = [[reach * self._worth(width, count)] for width in range(least, count + 1)]
        values = probs * np.array(worths) - rate * np.array(costs)
        row, column = divmod(int(values.argmax()), len(costs))
        return Choice(
            least + row, self.draft_widths[column], float(probs[row, column]), float(values[row, column]), costs[column]
        )

    def _worth(self, width: int, num_beams: int) -> float:
        """Layers of ``num_beams`` beams that a layer of ``width`` beams is worth."""
        if width == num_beams:
            return 1.0
        return 1.0 - self.quality * (1.0 / width - 1.0 / num_beams) / (1.0 - 1.0 / num_beams)

    def probs(self, features: torch.Tensor, num_beams: int, stage: Literal["prior", "full"]) -> np.ndarray:
        """Success probabilities of one layer, float32 (W, J), from its features (F,), computed on the host.

        In exact mode those of ``num_beams`` beams alone, (1, J).
        """
        return self._counting(self._host_nets[stage].success_probs(features.cpu().numpy(), num_beams), num_beams)

    @torch.inference_mode()
    def probs_on_device(self, features: torch.Tensor, num_beams: int) -> torch.Tensor:
        """The full network's, on the device of the features."""
        return self._counting(self._on(features.device).success_probs(features.unsqueeze(0))[0], num_beams)

    def _counting(self, probs_WJ: _Table, num_beams: int) -> _Table:
        """The rows of the widths that count."""
        return probs_WJ[num_beams - 1 if self.mode == "exact" else 0 : num_beams]

    def _on(self, device: torch.device) -> WidthPredictor:
        """The predictor on a device; copied there once."""
        if device not in self._copies:
            self._copies[device] = copy.deepcopy(self.predictor).to(device)
        return self._copies[device]


class _LearnedPlanner:
    """Plans one block."""

    def __init__(self, policy: LearnedWidth, ledger: _Ledger) -> None:
        self.policy = policy
        self.ledger = ledger
        self.trust = PromptTrust()
        self.reach = 1.0
        self.tokens = 0

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if not self._may_go_on(view):
            return None
        policy, trust = self.policy, self.trust
        prior_WJ = policy.probs(view.context_features, view.num_beams, "prior")
        hope = self._choose(prior_WJ, trust.prior.factor * trust.full.factor)
        price = self.ledger.rate * policy.draft_ms(view.num_parents)
        if view.layer == 0:
            trust.judge(hopeless=hope.value + hope.success <= price)  # it would not pay if it were twice as likely
        if hope.value <= price:
            return None
        full_WJ = policy.probs(view.features, view.num_beams, "full")
        cell = hope.width - 1, policy.draft_widths.index(hope.draft_width)
        trust.prior.add(float(prior_WJ[cell]), float(full_WJ[cell]))
        return self._settle(view, self._choose(full_WJ, trust.full.factor))

    def ask(self, view: LayerView) -> Question | None:
        """The choice of the full network alone: asking the prior first would add a wait to every layer."""
        if not self._may_go_on(view):
            return None
        probs_WJ = self.policy.probs_on_device(view.features, view.num_beams)

        def decide(values: Sequence[list[float]]) -> LayerPlan | None:
            full_WJ = np.array(values[0]).reshape(tuple(probs_WJ.shape))
            return self._settle(view, self._choose(full_WJ, self.trust.full.factor))

        return Question([probs_WJ], self.policy.draft_widths[-1], decide)

    def _may_go_on(self, view: LayerView) -> bool:
        """Whether a layer that is certain to be covered would be worth the draft's forward."""
        policy, ledger = self.policy, self.ledger
        if view.layer == 0:
            self.trust = view.notes.setdefault("trust", self.trust)
            self.trust.begin(view.outcomes)
            self.tokens = view.num_parents
            ledger.begin(policy.target_ms(self.tokens) + policy.profile.block_ms)
            if self.trust.rests():
                return False
        return view.layer < policy.max_gamma and self.reach > ledger.rate * policy.draft_ms(view.num_parents)

    def _settle(self, view: LayerView, choice: Choice) -> LayerPlan | None:
        """The plan by the full network; the draft's forward is paid for already."""
        policy, draft_ms = self.policy, self.policy.draft_ms(view.num_parents)
        if choice.value <= 0.0:
            self.ledger.add(0.0, draft_ms)
            return None
        self.trust.planned.append(min(choice.success / self.trust.full.factor, 1.0))  # as the network gave it
        self.reach *= choice.success
        self.tokens += choice.draft_width
        self.ledger.add(self.reach, draft_ms + choice.target_ms)
        return LayerPlan(view.num_beams if policy.mode == "exact" else choice.width, choice.draft_width)

    def _choose(self, probs_WJ: np.ndarray, trust: float) -> Choice:
        return self.policy.choose(np.minimum(probs_WJ * trust, 1.0), self.tokens, self.reach, self.ledger.rate)
