"""Coupled verification: walk the real beam step through the forest (design §3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .beams import Beams, FinishedBeams, Selection, beam_step, candidates_to_keep
from .forest import Forest
from .noise import gumbel
from .rules import SearchRules


@dataclass(frozen=True)
class LayerOutcome:
    """What verification found at one layer.

    Attributes:
        selection: the beam step's outcome at full width.
        covered: every selected live beam was a node of the forest.
        drafted: the layer was drafted (False for the bonus layer).
        drawn_nodes: for each candidate of ``selection.drawn`` its node in the forest, -1 where it is missing; empty at
            the bonus layer.
    """

    selection: Selection
    covered: bool
    drafted: bool
    drawn_nodes: list[int]


@dataclass
class Verification:
    """Outcome of one block.

    Attributes:
        live: the beams after the block; their nodes are new, the last of the forest.
        layers: one outcome per layer advanced, the recovered or bonus layer last.
        log_probs_LV: the target's processed log-probabilities at the beams of the last layer walked, float32 (L, V).
    """

    live: Beams
    log_probs_LV: torch.Tensor
    layers: list[LayerOutcome] = field(default_factory=list)


def verify_coupled(
    live: Beams,
    forest: Forest,
    drafted_layers: int,
    logits_at: Callable[[torch.Tensor], torch.Tensor],
    rules: SearchRules,
    finished: FinishedBeams,
    do_sample: bool,
    prompt_length: int,
) -> Verification:
    """Run the target's own beam step layer by layer while it stays inside the forest.

    The block ends at the first layer whose selection is not all in the forest (its beams are committed as they are:
    recovered), after one layer beyond the last drafted one (bonus), or with the search. The selection at every layer is
    that of the target alone, so the output cannot depend on what was drafted.

    Args:
        live: the beams at the block's start; they are nodes of the forest.
        forest: with the drafted nodes; the next live beams are appended to it.
        drafted_layers: layers drafted in this block.
        logits_at: maps node indices (L,) to the target's logits (L, V) there.
        rules: scoring and stopping.
        finished: the prompt's finished hypotheses, updated.
        do_sample: draw with noise, or take the best.
        prompt_length: tokens of the (padded) prompt in the beams' sequences.

    Returns:
        The beams after the block, and what happened at each layer.

    Raises:
        NumericalError: NaN logits.
    """
    num_beams = finished.num_beams
    keep = candidates_to_keep(num_beams, num_beams, rules.n_eos)
    tokens_of_vocab = torch.arange(rules.vocab_size, device=forest.device) if do_sample else None
    block = Verification(live, torch.empty(0))
    while True:
        beams = block.live
        block.log_probs_LV = rules.log_probs(beams.sequences_LT, logits_at(beams.nodes_L))
        selection = beam_step(
            beams.scores_L,
            block.log_probs_LV,
            None if tokens_of_vocab is None else gumbel(beams.paths_L, tokens_of_vocab),
            num_beams,
            keep,
            lambda parents, tokens, beams=beams: rules.stops(beams.sequences_LT, parents, tokens),  # type: ignore[misc]
        )
        finished.update(beams, selection, beams.sequences_LT.shape[1] + 1 - prompt_length)
        chosen = selection.live
        drafted = len(block.layers) < drafted_layers
        drawn_nodes: list[int] = []
        if drafted:
            drawn = selection.drawn
            drawn_nodes = forest.find_children(beams.nodes_L[drawn.parents_K], drawn.tokens_K).tolist()
        live_nodes = [drawn_nodes[index] for index in selection.live_index] if drafted else []
        covered = drafted and min(live_nodes, default=-1) >= 0
        block.layers.append(LayerOutcome(selection, covered, drafted, drawn_nodes))
        if finished.done:
            return block
        if covered:
            nodes = torch.tensor(live_nodes, dtype=torch.int64, device=forest.device)
        else:
            nodes = forest.add(beams.nodes_L[chosen.parents_K], chosen.tokens_K)
        block.live = beams.advance(chosen.parents_K, chosen.tokens_K, chosen.scores_K, nodes)
        if not covered:
            return block
