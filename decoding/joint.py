"""The target's and the draft's distributions over (beam, token) at one layer, side by side.

Only the draft's own columns matter one by one: everywhere else q = 0, so the target's mass there is one number, and so
is the draft's mass at parents that were not accepted, where p = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Joint:
    """p and q of one layer over N = (live parents x draft columns).

    Attributes:
        p_N: float64 (N,), the target's probabilities.
        q_N: float64 (N,), the draft's probabilities.
        p_rest: the target's mass outside the N.
        q_rest: the draft's mass outside the N: at parents that were not accepted.
        columns: draft columns per parent, N = parents * columns.
        log_total: normaliser of the draft's log-weights.
    """

    p_N: torch.Tensor
    q_N: torch.Tensor
    p_rest: float
    q_rest: float
    columns: int
    log_total: float


def make_joint(
    p_UV: torch.Tensor,
    log_weights_PV: torch.Tensor,
    token_ids_V: torch.Tensor | None,
    parents_U: torch.Tensor,
) -> Joint:
    """Put the two distributions side by side.

    Args:
        p_UV: float64 (U, V), the target's joint probabilities over (live node, token); they sum to 1.
        log_weights_PV: float32 (P, Vd), the draft's unnormalised log-probabilities over (parent, column).
        token_ids_V: int64 (Vd,), the target's token id of each column; None where they are the same.
        parents_U: int64 (U,), which of the P parents each live node is; distinct.
    """
    row_mass = torch.logsumexp(log_weights_PV, dim=1).double()
    total = torch.logsumexp(row_mass, dim=0)
    q_UV = (log_weights_PV[parents_U].double() - total).exp_()
    others = torch.ones_like(row_mass, dtype=torch.bool)
    others[parents_U] = False
    p_columns = p_UV if token_ids_V is None else p_UV[:, token_ids_V]
    inside = float(p_columns.sum())
    rest = 0.0 if token_ids_V is None else max(float(p_UV.sum()) - inside, 0.0)
    return Joint(
        p_N=p_columns.reshape(-1),
        q_N=q_UV.reshape(-1),
        p_rest=rest,
        q_rest=float((row_mass[others] - total).exp().sum()),
        columns=int(p_columns.shape[1]),
        log_total=float(total),
    )
