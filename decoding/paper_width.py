"""The paper's width rule (§3.2): as many beams as are accepted with probability ``threshold``.

The recursion. A slot's residuals are p_1 = p, p_{j+1} = norm(max(p_j - q, 0)); candidate j is accepted, given that the
ones before it were not, with probability a_j = sum min(p_j, q). All p_j have the form max(p - c_j q, 0) / Z_j with
Z_j = sum max(p - c_j q, 0), c_1 = 0 and c_{j+1} = c_j + Z_j, hence 1 - a_j = Z_{j+1} / Z_j and

    P(the slot is filled by its candidate i) = Z_i - Z_{i+1}.

After an acceptance the next slot starts afresh with the candidates that are left, so the candidate that fills slot k is
a sum of k independent such numbers: their distribution is a k-fold convolution, and P(at least k accepted among m) its
cumulative sum up to m. That is the paper's P(m, k), summed.

It is exact for candidates drawn with replacement and independent slots. For candidates without replacement and distinct
beams it is an approximation; docs/exactness.md says how close. Whatever it says, the law of the beams holds, since it
looks at p and q alone and never at the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .errors import ConfigError
from .joint import Joint
from .widths import BlockPlanner, LayerPlan, LayerView


def residual_masses(joint: Joint, count: int) -> list[float]:
    """Z_1 .. Z_{count+1}: P(a slot is still open after 0 .. count candidates)."""
    total = float(joint.p_N.sum()) + joint.p_rest
    masses, shift = [1.0], 0.0
    for _ in range(count):
        shift += masses[-1] * total
        left = torch.sub(joint.p_N, joint.q_N, alpha=shift).clamp_min_(0.0).sum()
        masses.append((float(left) + joint.p_rest) / total)
    return masses


def accept_probabilities(joint: Joint, count: int, width: int) -> list[float]:
    """P(at least k of ``count`` candidates are accepted), k = 1 .. width (paper §3.2).

    Args:
        joint: p and q of the layer.
        count: candidates (m).
        width: largest k.
    """
    masses = np.asarray(residual_masses(joint, count))
    first = np.concatenate([[0.0], masses[:-1] - masses[1:]])  # P(filled by candidate i), i = 0 .. count
    chances, filled = [], np.array([1.0])
    for _ in range(width):
        filled = np.convolve(filled, first)[: count + 1]
        chances.append(float(filled.sum()))
    return chances


@dataclass(frozen=True)
class PaperWidth:
    """The paper's policy: fixed depth and draft width, and of each layer as many beams as are likely accepted.

    Needs ``width_mode="dynamic"``. A `widths.WidthPolicy` and a `widths.WidthRule`.

    Args:
        gamma: layers drafted in one block.
        draft_width: candidates drafted at each layer (the paper's W_S).
        threshold: a layer keeps the most beams that are all accepted with at least this probability (t).

    Raises:
        ConfigError: a value out of range.
    """

    gamma: int
    draft_width: int
    threshold: float = 0.7

    def __post_init__(self) -> None:
        if self.gamma < 0 or self.draft_width < 1:
            raise ConfigError(
                f"gamma is {self.gamma} and draft_width {self.draft_width}: they must be at least 0 and at least 1"
            )
        if not 0.0 < self.threshold < 1.0:
            raise ConfigError(f"threshold is {self.threshold}: it is a probability, strictly between 0 and 1")

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `widths.WidthPolicy.start_block`."""
        return _PaperPlanner(self, num_beams)

    def choose(self, joint: Joint, draft_width: int, num_beams: int) -> int:
        """See `widths.WidthRule.choose`: max{k : P(at least k accepted) >= threshold}, 0 where there is none."""
        chances = accept_probabilities(joint, draft_width, num_beams)
        return max((width for width, chance in enumerate(chances, start=1) if chance >= self.threshold), default=0)


@dataclass(frozen=True)
class _PaperPlanner:
    policy: PaperWidth
    num_beams: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if view.layer >= self.policy.gamma:
            return None
        return LayerPlan(width=self.num_beams, draft_width=self.policy.draft_width, rule=self.policy)
