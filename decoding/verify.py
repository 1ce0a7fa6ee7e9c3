"""Verification: which of the drafted beams stand (design §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .beams import Beams, beam_step, candidates_to_keep
from .drafting import DraftedLayer
from .joint import Joint, make_joint
from .noise import gumbel
from .outcome import LayerOutcome, Verification, layer_width
from .rejection import verify_rejection
from .rows import Row

LogitsAt = Callable[[torch.Tensor], torch.Tensor]


def verify(row: Row, layers: Sequence[DraftedLayer], logits_at: LogitsAt) -> Verification:
    """Verify a block as the request's ``verification`` says.

    Args:
        row: the prompt; its forest gets the next live beams, its finished hypotheses are updated.
        layers: what was drafted in this block.
        logits_at: maps node indices (L,) to the target's logits (L, V) there.

    Returns:
        The beams after the block, and what happened at each layer.

    Raises:
        NumericalError: NaN logits.
    """
    return (verify_rejection if row.request.config.rejection else verify_coupled)(row, layers, logits_at)


def verify_coupled(row: Row, layers: Sequence[DraftedLayer], logits_at: LogitsAt) -> Verification:
    """Run the target's own beam step layer by layer while it stays inside the forest.

    The block ends at the first layer whose selection is not all in the forest (its beams are committed as they are:
    recovered), after one layer beyond the last drafted one (bonus), or with the search. The selection at every layer is
    that of the target alone, so in exact mode the output cannot depend on what was drafted. In dynamic mode a drafted
    layer keeps fewer beams, drafted or recovered; the bonus layer has all of them again.

    Arguments, result and errors: see `verify`.
    """
    rules, forest, config = row.request.rules, row.forest, row.request.config
    num_beams = config.num_beams
    tokens_of_vocab = torch.arange(rules.vocab_size, device=forest.device) if config.do_sample else None
    block = Verification(row.live, torch.empty(0))
    while True:
        beams = block.live
        log_probs = block.log_probs_LV = rules.log_probs(beams.sequences_LT, logits_at(beams.nodes_L))
        full = beam_step(
            beams.scores_L,
            log_probs,
            None if tokens_of_vocab is None else gumbel(beams.paths_L, tokens_of_vocab),
            num_beams,
            candidates_to_keep(num_beams, num_beams, rules.n_eos),
            lambda parents, tokens, beams=beams: rules.stops(beams.sequences_LT, parents, tokens),  # type: ignore[misc]
        )
        layer = layers[len(block.layers)] if len(block.layers) < len(layers) else None
        if layer is None:
            outcome, selection = LayerOutcome(full, False, False, [], num_beams), full
        else:
            above = layers[len(block.layers) - 1] if block.layers else None
            width = layer_width(config, layer.plan, partial(_compare, row, beams, log_probs, layer, above))
            selection = full
            if width < num_beams:
                selection = full.at_width(width, candidates_to_keep(width, num_beams, rules.n_eos))
            drawn = full.drawn
            nodes = forest.find_children(beams.nodes_L[drawn.parents_K], drawn.tokens_K).tolist()
            covered = min((nodes[index] for index in selection.live_index), default=-1) >= 0
            outcome = LayerOutcome(full, covered, True, nodes, width)
        if block.advance(row, outcome, selection):
            return block


def _compare(
    row: Row, beams: Beams, log_probs_LV: torch.Tensor, layer: DraftedLayer, above: DraftedLayer | None
) -> Joint:
    """Compare target and draft at a layer."""
    weights = row.request.rules.log_weights(beams.scores_L, log_probs_LV)
    p_LV = torch.softmax(weights.view(-1), dim=0).view_as(weights).double()
    origin = row.live.nodes_L[0] if above is None else above.first_node  # the node of the draft's parent 0
    return make_joint(p_LV, layer.weigh(), layer.token_ids_V, beams.nodes_L - origin)
