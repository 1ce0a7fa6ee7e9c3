"""The width predictor: how many draft candidates cover the target's beams at a layer (design §6).

For each width w it gives a discrete hazard over bins of candidate counts: the chance that the w-th width is covered
within a bin, given that it was not before. Success probabilities grow with the number of candidates and shrink with the
width by construction. Outcomes are right-censored where too few candidates were drafted, so it is fitted by a censored
likelihood, as in survival analysis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import softplus

from beamwise.decoding.errors import ConfigError
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES

from .host_net import HostNet

DEFAULT_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CLIP = 6.0
"""Standardised features are cut off here, so that an outlier cannot throw the network off."""


@dataclass(frozen=True)
class PredictorConfig:
    """Shape of a predictor.

    Attributes:
        max_width: largest ``num_beams`` it serves (W).
        edges: upper edges of the bins, increasing; the draft widths that it answers for (J of them).
        hidden: units in each of the two hidden layers.

    Raises:
        ConfigError: a value out of range.
    """

    max_width: int = 8
    edges: tuple[int, ...] = DEFAULT_EDGES
    hidden: int = 32

    def __post_init__(self) -> None:
        if self.max_width < 1 or self.hidden < 1:
            raise ConfigError(f"max_width is {self.max_width} and hidden {self.hidden}: both must be at least 1")
        if not self.edges or self.edges[0] < 1 or sorted(set(self.edges)) != list(self.edges):
            raise ConfigError(f"edges are {self.edges}: give increasing candidate counts, the first at least 1")


class HazardNet(nn.Module):
    """A small network from features to hazards.

    Args:
        num_features: F.
        config: its shape.
    """

    mean: torch.Tensor
    std: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, num_features: int, config: PredictorConfig) -> None:
        super().__init__()
        self.bins, self.max_width = len(config.edges), config.max_width
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("std", torch.ones(num_features))
        self.register_buffer("scale", torch.ones(1))  # calibration, fitted after training
        self.register_buffer("shift", torch.zeros(self.bins))
        self.layers = nn.Sequential(
            nn.Linear(num_features, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, self.bins + self.max_width - 1),
        )
        self.steps = nn.Parameter(torch.zeros(self.max_width - 1, self.bins))

    def raw_logits(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Logits of the hazards before calibration, float32 (N, W, J), decreasing in W."""
        standard = ((features_NF - self.mean) / self.std).clamp(-_CLIP, _CLIP)
        out = self.layers(standard)
        first = out[:, : self.bins].unsqueeze(1)
        steps = softplus(out[:, self.bins :].unsqueeze(2) + self.steps)
        return torch.cat([first, first - steps.cumsum(1)], dim=1)

    def forward(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Logits of the hazards, float32 (N, W, J), for features float32 (N, F)."""
        return self.raw_logits(features_NF) * self.scale + self.shift

    def success_probs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """P(candidates needed at width w <= edge j), float32 (N, W, J), for features float32 (N, F)."""
        return success_from_logits(self(features_NF))

    def on_host(self) -> HostNet:
        """The network as it is now, for one layer at a time on the host."""
        return HostNet(self, _CLIP)


def success_from_logits(logits_NWJ: torch.Tensor) -> torch.Tensor:
    """Hazard logits to success probabilities, both (N, W, J)."""
    return -torch.expm1(-softplus(logits_NWJ).cumsum(2))


class WidthPredictor(nn.Module):
    """Success probabilities of a layer, before and after the draft has run there.

    Attributes:
        prior: reads the context features only, so that the draft's forward itself can be saved.
        full: reads the whole vector.

    Args:
        config: shape of both networks.
    """

    def __init__(self, config: PredictorConfig | None = None) -> None:
        super().__init__()
        self.config = config if config is not None else PredictorConfig()
        self.prior = HazardNet(len(CONTEXT_NAMES), self.config)
        self.full = HazardNet(len(FEATURE_NAMES), self.config)

    def forward(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Same as `success_probs`; what is exported."""
        return self.success_probs(features_NF)

    def success_probs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """P(success at width w with ``edges[j]`` candidates) once the draft has run.

        Args:
            features_NF: float32 (N, F), ``features.FEATURE_NAMES``.

        Returns:
            float32 (N, W, J), growing in j, shrinking in w.
        """
        return self.full.success_probs(features_NF)

    def prior_probs(self, context_NC: torch.Tensor) -> torch.Tensor:
        """The same before the draft runs, from context features float32 (N, C), ``features.CONTEXT_NAMES``."""
        return self.prior.success_probs(context_NC)

    def set_statistics(self, mean_F: torch.Tensor, std_F: torch.Tensor) -> None:
        """Set the means and standard deviations that features are normalised with, float32 (F,) each."""
        for net in (self.prior, self.full):
            count = net.mean.shape[0]
            net.mean.copy_(mean_F[:count])
            net.std.copy_(std_F[:count].clamp_min(1e-3))


@dataclass(frozen=True)
class Outcomes:
    """What was observed of N layers on the grid of W widths and J edges.

    Attributes:
        event: bool (N, W, J), covered within this bin.
        survived: bool (N, W, J), known not to be covered up to this bin's edge.
        known: bool (N, W, J), success at (w, edge) was observed whatever it is: as many candidates were drafted. Cells
            with fewer candidates than beams are left out, since there is nothing to predict.
        success: bool (N, W, J), covered with ``edge`` candidates; meaningful where known.
    """

    event: torch.Tensor
    survived: torch.Tensor
    known: torch.Tensor
    success: torch.Tensor


def grid_outcomes(
    needed_NW: torch.Tensor, num_beams_N: torch.Tensor, limit_N: torch.Tensor, edges: Sequence[int]
) -> Outcomes:
    """Put ``candidates_needed`` on the grid.

    Args:
        needed_NW: int (N, W), 0 where not covered; columns beyond a row's ``num_beams`` are ignored.
        num_beams_N: int (N,), beams of each row.
        limit_N: int (N,), candidates up to which the outcome was seen (the number drafted; beyond any edge where the
            draft had no more to give).
        edges: upper edges of the bins.

    Returns:
        The outcomes. Only cells up to the limit are known, even where a success below the limit decides wider ones too:
        failures there would be missing, and the successes alone would be biased.
    """
    edge_J = torch.as_tensor(edges, device=needed_NW.device)
    needed, limit = needed_NW.unsqueeze(2), limit_N.view(-1, 1, 1)
    widths = torch.arange(1, needed_NW.shape[1] + 1, device=needed_NW.device)
    valid = (widths <= num_beams_N.unsqueeze(1)).unsqueeze(2)
    covered = needed > 0
    success = covered & (needed <= edge_J)
    lower = torch.cat([edge_J.new_zeros(1), edge_J[:-1]])
    return Outcomes(
        event=valid & success & (needed > lower),
        survived=valid & torch.where(covered, needed > edge_J, edge_J <= limit),
        known=valid & (edge_J <= limit) & (edge_J >= widths.unsqueeze(1)),
        success=success,
    )


def censored_nll(logits_NWJ: torch.Tensor, outcomes: Outcomes) -> torch.Tensor:
    """Mean negative log-likelihood (nats) per observed (layer, width); censored ones count by their survival.

    Args:
        logits_NWJ: float32 (N, W, J), from `HazardNet`.
        outcomes: of the same layers.

    Returns:
        float32 ().
    """
    terms = outcomes.survived * softplus(logits_NWJ) + outcomes.event * softplus(-logits_NWJ)
    seen = (outcomes.survived | outcomes.event).any(2)
    return terms.sum() / seen.sum().clamp_min(1)
