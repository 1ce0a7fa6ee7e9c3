"""What a width policy knows about a layer before its candidates are drawn, as a named vector (design §5).

The vector has two parts. The context part is known before the draft runs at all, so that a policy can save even that
forward; the draft part reads the draft's distribution at the layer's parents. Neither sees this layer's noise, so the
features cannot depend on which candidates will be drawn. Everything stays on the device: no value is read by the host.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache

import torch

from .topk import topk_rows

SCHEMA_VERSION = 2
"""Raised whenever a feature is added, removed, reordered or computed differently."""

_TOP = 32
"""Best tokens read per parent."""

_MAX_PARENTS = 8
"""Parents whose distributions are read, the first in the draft's order; bounds the cost."""

_MASS_RANKS = (1, 2, 4, 8, 16, 32)
_GAP_RANKS = (8, 16, 32)
_GAP_LIMIT = 30.0
"""Gaps between log-probabilities are cut off here (nats), so that they are finite."""

CONTEXT_NAMES: tuple[str, ...] = (
    "layer",
    "num_beams",
    "log_num_parents",
    "do_sample",
    "log_position",
    "log_prompt_length",
    "num_finished",
    "recent_acceptance",
    "num_roots",
    "root_score_gap",
    "root_score_spread",
    "path_log_prob",
    "parent_entropy",
    "parent_top1",
    "parent_mass",
    "parent_score_spread",
)
"""Features known before the draft runs at this layer."""

DRAFT_NAMES: tuple[str, ...] = (
    "draft_entropy",
    "draft_entropy_max",
    "draft_top1",
    "draft_top1_min",
    "draft_gap",
    "draft_mass_4",
    "draft_mass_16",
    "first_entropy",
    "first_top1",
    "first_gap",
    "joint_entropy",
    *(f"joint_mass_{rank}" for rank in _MASS_RANKS),
    *(f"joint_gap_{rank}" for rank in _GAP_RANKS),
    "joint_support",
)
"""Features of the draft's distribution at the layer's parents."""

FEATURE_NAMES: tuple[str, ...] = CONTEXT_NAMES + DRAFT_NAMES
"""Names of the whole vector, in order; docs/traces.md defines each."""


def schema_hash() -> str:
    """Fingerprint of the schema (version, names and their order), 16 hexadecimal digits."""
    text = "\n".join((str(SCHEMA_VERSION), *FEATURE_NAMES))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FeatureInputs:
    """What is known before the draft runs at a layer. P parents, L live beams at the block's start.

    Attributes:
        layer: index of the layer in its block, from 0.
        num_beams: beams asked for (W).
        position: tokens generated so far at the block's start.
        prompt_length: tokens of the prompt.
        do_sample: beams are drawn, not searched for.
        num_finished: finished hypotheses.
        recent_acceptance: running share of drafted layers that were covered.
        parent_scores_P: float32 (P,), the parents' accumulated scores, in the draft's order.
        root_scores_L: float32 (L,), the live beams' true scores at the block's start, best first.
    """

    layer: int
    num_beams: int
    position: int
    prompt_length: int
    do_sample: bool
    num_finished: int
    recent_acceptance: float
    parent_scores_P: torch.Tensor
    root_scores_L: torch.Tensor


def context_features(inputs: FeatureInputs) -> torch.Tensor:
    """The context part.

    Returns:
        float32 (C,), as `CONTEXT_NAMES` orders it, on the device of the scores.
    """
    scores, roots = inputs.parent_scores_P, inputs.root_scores_L
    count, width = scores.shape[0], min(inputs.num_beams, scores.shape[0])
    numbers = [
        float(inputs.layer),
        float(inputs.num_beams),
        math.log2(count),
        float(inputs.do_sample),
        math.log1p(inputs.position),
        math.log1p(inputs.prompt_length),
        inputs.num_finished / inputs.num_beams,
        inputs.recent_acceptance,
        float(roots.shape[0]),
    ]
    roots = roots.sort(descending=True).values
    weights, kept = torch.softmax(scores, dim=0), scores[:width]
    high = torch.stack([roots[0], roots[0], roots[0], scores.max()])
    low = torch.stack([roots[min(1, roots.shape[0] - 1)], roots[-1], kept.max(), kept.min()])
    root_gap, root_spread, path, parent_spread = _gap(high, low).unbind()
    tensors = [
        root_gap,
        root_spread,
        -path.clamp_min(0.0),
        torch.special.entr(weights).sum(),
        weights.max(),
        weights[:width].sum(),
        parent_spread,
    ]
    # a pageable copy that does not wait for the device
    head = torch.tensor(numbers).to(scores.device, non_blocking=True)
    return torch.cat([head, torch.stack(tensors)])


def draft_features(inputs: FeatureInputs, draft_log_probs_PV: torch.Tensor) -> torch.Tensor:
    """The draft part.

    Only the first ``num_beams`` parents in the draft's order are read: they are the beams that the target will extend
    here, if it agrees with the draft so far.

    Args:
        inputs: of the layer.
        draft_log_probs_PV: float32 (P, Vd), processed log-probabilities at the parents, over the draft's vocabulary;
            -inf excludes a token, a whole row, or (Vd = 0) everything.

    Returns:
        float32 (D,), as `DRAFT_NAMES` orders it.
    """
    kept = min(inputs.num_beams, draft_log_probs_PV.shape[0], _MAX_PARENTS)
    log_probs = draft_log_probs_PV[:kept]
    if log_probs.shape[1] < _TOP:
        log_probs = torch.nn.functional.pad(log_probs, (0, _TOP - log_probs.shape[1]), value=float("-inf"))
    entropy, top, normaliser = _row_statistics(log_probs, _TOP)
    weights = torch.softmax(inputs.parent_scores_P[:kept] + normaliser, dim=0).nan_to_num(0.0)
    masses = top.exp().cumsum(1)
    each = torch.stack([entropy, masses[:, 0], _gap(top[:, 0], top[:, 1]), masses[:, 3], masses[:, 15]])
    mean_entropy, mean_top1, *means = (each @ weights).unbind()
    joint = (top + weights.log().unsqueeze(1)).view(-1).topk(_TOP).values
    mass_ranks, gap_ranks = _ranks(joint.device)
    values = [
        mean_entropy,
        entropy.max(),
        mean_top1,
        masses[:, 0].min(),
        *means,
        *each[:3, 0].unbind(),
        torch.special.entr(weights).sum() + mean_entropy,
        *joint.exp().cumsum(0)[mass_ranks].unbind(),
        *_gap(joint[min(inputs.num_beams, _TOP) - 1], joint[gap_ranks]).unbind(),
        (joint > float("-inf")).sum().float().log1p(),
    ]
    return torch.stack(values)


@cache
def _ranks(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of `_MASS_RANKS` and `_GAP_RANKS` on the device."""
    with torch.inference_mode(False):  # they serve in other modes, too
        mass, gap = torch.tensor(_MASS_RANKS) - 1, torch.tensor(_GAP_RANKS) - 1
        return mass.to(device), gap.to(device)


def layer_features(
    inputs: FeatureInputs, draft_log_probs_PV: torch.Tensor, context_C: torch.Tensor | None = None
) -> torch.Tensor:
    """The whole vector.

    Args:
        inputs: of the layer.
        draft_log_probs_PV: float32 (P, Vd), see `draft_features`.
        context_C: the context part, where it was computed before.

    Returns:
        float32 (F,), as `FEATURE_NAMES` orders it.
    """
    context_C = context_features(inputs) if context_C is None else context_C
    return torch.cat([context_C, draft_features(inputs, draft_log_probs_PV)])


def _row_statistics(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entropy (K,), the ``count`` best normalised log-probabilities (K, count), log-normaliser (K,) of each row.

    Rows without any proposal have entropy 0, log-probabilities and normaliser -inf.
    """
    top = topk_rows(log_probs, count)[0]
    probs = torch.softmax(log_probs, dim=1)
    normaliser = top[:, 0] - probs.amax(dim=1).log()  # NaN in a row without any proposal, as the next line
    entropy = normaliser - probs.mul_(log_probs.clamp_min(-1e4)).sum(1)  # p log p -> 0 at excluded tokens
    top = (top - normaliser.unsqueeze(1)).nan_to_num(float("-inf"), neginf=float("-inf"))
    return entropy.nan_to_num(0.0).clamp_min(0.0), top, normaliser.nan_to_num(float("-inf"), neginf=float("-inf"))


def _gap(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Difference of log-probabilities, cut off so that it is finite; 0 between two excluded ones."""
    return (high - low).nan_to_num(0.0, posinf=_GAP_LIMIT, neginf=-_GAP_LIMIT).clamp(-_GAP_LIMIT, _GAP_LIMIT)
