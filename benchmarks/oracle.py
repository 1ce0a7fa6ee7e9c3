"""The best plan in hindsight, found by looking: what would each block have accepted, wherever it had started?

In exact mode the text does not depend on the plan, so a prompt can be decoded again and again while a deep and wide
draft is tried at every position where a block might start. With that known, and a latency profile, the fastest way
through the text is a shortest path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.trace_log import candidates_needed
from beamwise.decoding.widths import BlockPlanner, LayerPlan, LayerView, OracleWidth


@dataclass(frozen=True)
class Start:
    """What a block that starts at some position could have.

    Attributes:
        roots: live beams there.
        needed: candidates needed at each layer that can be covered, one layer after the other.
    """

    roots: int
    needed: Sequence[int]


class Survey:
    """A policy and an observer: drafts deep and wide at every position once, and not at all where it has been.

    Args:
        gamma: layers to try.
        draft_width: candidates to try.
    """

    def __init__(self, gamma: int, draft_width: int) -> None:
        self.gamma = gamma
        self.draft_width = draft_width
        self.starts: dict[int, Start] = {}

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `decoding.widths.WidthPolicy.start_block`."""
        return _SurveyPlanner(self, num_beams)

    def __call__(self, record: BlockRecord) -> None:
        """Take in one block."""
        position = record.start.sequences_LT.shape[1] - record.row.request.prompt_T.shape[0]
        if position in self.starts:
            return
        request, needed = record.row.request, []
        for layer, outcome in zip(record.layers, record.verification.layers, strict=False):
            if not outcome.covered:
                break
            needed.append(candidates_needed(outcome, layer, request.config.num_beams, request.rules.n_eos)[-1])
        self.starts[position] = Start(len(record.start), needed)

    def explore(self, decode: Callable[[], int]) -> int:
        """Decode until every position has been tried.

        Args:
            decode: decodes the prompt with this policy and observer; returns the layers decoded.

        Returns:
            The layers of the text.
        """
        layers = decode()
        while any(position not in self.starts for position in range(layers)):
            before = len(self.starts)
            decode()
            if len(self.starts) == before:  # rounding made the text end elsewhere: what is missing cannot be reached
                break
        return layers


@dataclass(frozen=True)
class _SurveyPlanner:
    survey: Survey
    num_beams: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if view.layer >= self.survey.gamma or view.position in self.survey.starts:
            return None
        return LayerPlan(self.num_beams, self.survey.draft_width)


def best_plan(starts: Mapping[int, Start], layers: int, profile: LatencyProfile) -> OracleWidth:
    """The fastest plan for a text, by dynamic programming from its end.

    Args:
        starts: from `Survey`; a position that is missing counts as one where nothing is accepted.
        layers: of the text.
        profile: prices it.
    """
    best = [0.0] * (layers + 1)
    plans: dict[int, Sequence[int]] = {}
    for position in range(layers - 1, -1, -1):
        start = starts.get(position, Start(1, ()))
        parents, tokens, drafting = start.roots, start.roots, 0.0
        best[position], plans[position] = profile.block_ms + profile.target(tokens) + best[position + 1], ()
        for depth, needed in enumerate(start.needed, start=1):
            drafting += profile.draft(parents) + profile.layer_ms
            parents = needed
            tokens += needed
            after = min(position + depth + 1, layers)
            cost = profile.block_ms + drafting + profile.target(tokens) + best[after]
            if cost < best[position]:
                best[position], plans[position] = cost, tuple(start.needed[:depth])
    return OracleWidth(plans)
