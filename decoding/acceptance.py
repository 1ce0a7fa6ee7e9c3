"""Accepting or refusing a layer's candidates: the arithmetic of rejection verification, on probabilities alone.

Within one slot all residuals have one form, max(p - c q, 0) with one number c, since every q_j is a multiple of q. So a
refusal costs one pass over the draft's columns, and an acceptance none. docs/exactness.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .joint import Joint


@dataclass(frozen=True)
class Acceptance:
    """What became of a layer's candidates.

    Attributes:
        accepted: the candidates that filled slots, in order.
        residual_N: float64 (N,), the open slot's unnormalised residual on the draft's columns; None where all slots are
            filled. Outside the columns it is p.
    """

    accepted: list[int]
    residual_N: torch.Tensor | None


class _OpenSlot:
    """The residual of the slot that is open: max(p - c q, 0) / mass, with the candidates drawn so far left out of q."""

    def __init__(self, joint: Joint, distinct: bool) -> None:
        self.p_N, self.q_N = joint.p_N.clone(), joint.q_N.clone()
        self.p_rest = joint.p_rest
        self.distinct = distinct
        self.shift = 0.0  # c
        self.rejected: dict[int, float] = {}  # by this slot: their p
        self.mass = self._mass()

    def _mass(self) -> float:
        return float(self.residual().sum()) + self.p_rest

    def residual(self) -> torch.Tensor:
        """On the draft's columns, float64 (N,), unnormalised."""
        return torch.sub(self.p_N, self.q_N, alpha=self.shift).clamp_min_(0.0) if self.shift else self.p_N

    def prob(self, p: float, q: float) -> float:
        """Residual probability of a candidate."""
        return max(p - self.shift * q, 0.0) / self.mass

    def reject(self, index: int, q: float, left: float) -> bool:
        """A candidate (index -1: its parent is not live) with share q of the ``left`` q-mass was refused.

        Returns:
            False where nothing would be left of the residual: r and q are equal up to rounding, and the candidate has
            to be accepted.
        """
        before = self.shift, self.mass
        p = 0.0
        if index >= 0:
            p, self.q_N[index] = float(self.p_N[index]), 0.0
            self.p_N[index] = 0.0
        self.shift += self.mass / left
        self.mass = self._mass()
        if self.mass > 0.0:
            if index >= 0:
                self.rejected[index] = p
            return True
        self.shift, self.mass = before
        if index >= 0:
            self.p_N[index] = p
        return False

    def accept(self, index: int) -> None:
        """The slot is filled; the next one opens with p (less what was accepted, for distinct beams)."""
        self.q_N[index] = 0.0
        for other, p in self.rejected.items():
            self.p_N[other] = p
        self.rejected.clear()
        if self.distinct:
            self.p_N[index] = 0.0
        self.shift = 0.0
        self.mass = self._mass()


def left_masses(joint: Joint, index_M: Sequence[int], q_M: Sequence[float]) -> list[float]:
    """q-mass that is left before each candidate is drawn, (M,): sums from the tail, which do not cancel."""
    inside = [index for index in index_M if index >= 0]
    kept = joint.q_N.clone()
    kept[torch.tensor(inside, dtype=torch.int64, device=kept.device)] = 0.0
    dead = sum(q for index, q in zip(index_M, q_M, strict=True) if index < 0)
    left = float(kept.sum()) + max(joint.q_rest - dead, 0.0)
    masses = []
    for q in reversed(q_M):
        left += q
        masses.append(left)
    return masses[::-1]


def accept_candidates(
    joint: Joint,
    index_M: Sequence[int],
    q_M: Sequence[float],
    uniforms_M: Sequence[float],
    width: int,
    distinct: bool,
) -> Acceptance:
    """Offer a layer's candidates to its slots, one after the other (§3.1).

    Args:
        joint: p and q of the layer.
        index_M: for each candidate, in the order drawn, its place in the joint's N; -1 where its parent is not live.
        q_M: their probabilities under q.
        uniforms_M: one uniform number each.
        width: slots.
        distinct: slots are draws without replacement; otherwise independent.

    Returns:
        The accepted candidates, and the residual of the slot left open. Fewer than ``width`` are accepted and no slot
        is open where distinct slots have used up all of p.
    """
    slot = _OpenSlot(joint, distinct)
    p_M = [float(joint.p_N[index]) if index >= 0 else 0.0 for index in index_M]
    accepted: list[int] = []
    for number, left in enumerate(left_masses(joint, index_M, q_M)):
        if len(accepted) == width or slot.mass <= 0.0:
            break
        index, p, q = index_M[number], p_M[number], q_M[number]
        taken = index >= 0 and uniforms_M[number] * (q / left) < slot.prob(p, q)
        if not taken:
            taken = not slot.reject(index, q, left) and index >= 0
        if taken:
            accepted.append(number)
            slot.accept(index)
    full = len(accepted) == width or slot.mass <= 0.0
    return Acceptance(accepted, None if full else slot.residual())


def draw_slots(weights_N: torch.Tensor, uniforms: Sequence[float], distinct: bool) -> list[int]:
    """Draws from unnormalised float64 weights (N,), one per uniform number; distinct ones end when nothing is left."""
    if distinct:
        weights_N = weights_N.clone()
    drawn: list[int] = []
    sums = weights_N.cumsum(0)
    for number in uniforms:
        if float(sums[-1]) <= 0.0:
            break
        drawn.append(int(torch.searchsorted(sums, sums[-1] * number, right=True)))
        if distinct:
            weights_N[drawn[-1]] = 0.0
            sums = weights_N.cumsum(0)
    return drawn
