"""What verification finds, whichever way it verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .beams import Beams, Selection
from .config import DecodeConfig
from .host import upload
from .joint import Joint
from .rows import Row
from .widths import LayerPlan


@dataclass(frozen=True)
class LayerOutcome:
    """What verification found at one layer.

    Attributes:
        selection: the beams chosen (coupled: at full width, so that traces can tell what any width needs).
        covered: every selected live beam was a node of the forest.
        drafted: the layer was drafted (False for the bonus layer).
        drawn_nodes: for each candidate of ``selection.drawn`` its node in the forest, -1 where it is missing; empty at
            the bonus layer.
        width: beams asked for at this layer.
        joint: p and q, where they were compared.
    """

    selection: Selection
    covered: bool
    drafted: bool
    drawn_nodes: list[int]
    width: int
    joint: Joint | None = None


@dataclass
class Verification:
    """Outcome of one block.

    Attributes:
        live: the beams after the block; their nodes are new, the last of the forest.
        layers: one outcome per layer advanced, the recovered or bonus layer last.
        log_probs_LV: the target's processed log-probabilities at the beams of the last layer walked, float32 (L, V).
        known: the parents of all nodes and the nodes of the live beams, where the host knows them.
    """

    live: Beams
    log_probs_LV: torch.Tensor
    layers: list[LayerOutcome] = field(default_factory=list)
    known: tuple[list[int], list[int]] | None = None

    def advance(
        self, row: Row, outcome: LayerOutcome, selection: Selection, parents: Sequence[int] | None = None
    ) -> bool:
        """Take in a layer: finished beams leave; the others walk on or, where one is missing, are added to the forest.

        Args:
            row: the prompt.
            outcome: of the layer.
            selection: the beams to keep, `LayerOutcome.selection` or a narrower one.
            parents: of the candidates in ``selection.drawn``, among the live beams, where the host knows them.

        Returns:
            Whether the block ends here.
        """
        beams, forest = self.live, row.forest
        self.layers.append(outcome)
        row.finished.update(beams, selection, beams.sequences_LT.shape[1] + 1 - row.request.prompt_T.shape[0])
        if row.finished.done:
            return True
        chosen = selection.live
        if outcome.covered:
            live_nodes = [outcome.drawn_nodes[index] for index in selection.live_index]
            nodes = upload(live_nodes, forest.device)
            if self.known is not None:
                self.known = self.known[0], live_nodes
        else:
            if self.known is not None and parents is not None:
                nodes_of_parents = [self.known[1][parents[index]] for index in selection.live_index]
                fresh = list(range(forest.size, forest.size + len(chosen)))
                self.known = self.known[0] + nodes_of_parents, fresh
            nodes = forest.add(beams.nodes_L[chosen.parents_K], chosen.tokens_K)
        self.live = beams.advance(chosen.parents_K, chosen.tokens_K, chosen.scores_K, nodes)
        return not outcome.covered


def layer_width(config: DecodeConfig, plan: LayerPlan, joint: Callable[[], Joint]) -> int:
    """Beams to draw at a drafted layer: ``num_beams`` in exact mode, else what the plan or its rule says."""
    if config.width_mode == "exact":
        return config.num_beams
    width = plan.width if plan.rule is None else plan.rule.choose(joint(), plan.draft_width, config.num_beams)
    return max(config.min_width, min(width, config.num_beams))
