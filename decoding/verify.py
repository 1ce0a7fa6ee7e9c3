"""Verification: which of the drafted beams stand (design §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from .beams import Beams, Candidates, candidates_to_keep, draw_beams, live_candidates, settle_beams
from .drafting import DraftedLayer
from .host import read, reads_are_free
from .joint import Joint, make_joint
from .noise import gumbel_where
from .outcome import LayerOutcome, Verification, layer_width
from .rejection import verify_rejection
from .rows import Row


@dataclass(frozen=True)
class Block:
    """A block of one prompt after the target's forward.

    Attributes:
        row: the prompt; its forest gets the next live beams, its finished hypotheses are updated.
        layers: what was drafted in this block.
        logits_NV: the target's logits (N, V) at the forest's last nodes.
        first_node: the first of these.
    """

    row: Row
    layers: Sequence[DraftedLayer]
    logits_NV: torch.Tensor
    first_node: int

    def logits_at(self, nodes_L: torch.Tensor) -> torch.Tensor:
        """The target's logits (L, V) at nodes (L,)."""
        return self.logits_NV[nodes_L - self.first_node]


def verify(blocks: Sequence[Block]) -> list[Verification]:
    """Verify a block of every prompt, as its request's ``verification`` says.

    Where the host's reads cost a wait, coupled blocks are first computed ahead through all their layers, also those
    that they turn out not to reach, and then read together: one wait for all prompts.

    Args:
        blocks: one per prompt.

    Returns:
        For each, the beams after the block, and what happened at each layer.

    Raises:
        NumericalError: NaN logits.
    """
    walks = {
        number: _CoupledBlock(block) for number, block in enumerate(blocks) if not block.row.request.config.rejection
    }
    ahead = {number: walk.look_ahead() for number, walk in walks.items() if walk.can_look_ahead}
    questions = [tensor for looks in ahead.values() for look in looks for tensor in look.questions]
    answers = iter(read(questions + [walks[number].parents for number in ahead]) if ahead else [])
    for looks in ahead.values():
        for look in looks:
            look.answers = [next(answers) for _ in look.questions]
    for number in ahead:
        walks[number].learn_parents(next(answers))
    verifications = []
    for number, block in enumerate(blocks):
        walk = walks.get(number)
        if walk is None:
            verifications.append(verify_rejection(block.row, block.layers, block.logits_at))
        else:
            verifications.append(walk.run(ahead.get(number, [])))
    return verifications


@dataclass
class _Look:
    """The target's beam step at one layer, as far as the device can take it.

    Attributes:
        log_probs_LV: processed log-probabilities of the beams, those of no meaning included.
        drawn: the candidates.
        stopped_K: which of them end.
        nodes_K: their nodes in the forest, -1 where missing; None at the bonus layer.
        answers: values of ``questions``, once they were read.
    """

    log_probs_LV: torch.Tensor
    drawn: Candidates
    stopped_K: torch.Tensor
    nodes_K: torch.Tensor | None
    answers: list[list[float]] | None = None

    @cached_property
    def questions(self) -> list[torch.Tensor]:
        """What the host has to know."""
        nodes = [] if self.nodes_K is None else [self.nodes_K]
        return [self.drawn.scores_K, self.stopped_K, self.drawn.parents_K, *nodes]


class _CoupledBlock:
    """Run the target's own beam step layer by layer while it stays inside the forest.

    The block ends at the first layer whose selection is not all in the forest (its beams are committed as they are:
    recovered), after one layer beyond the last drafted one (bonus), or with the search. The selection at every layer is
    that of the target alone, so in exact mode the output cannot depend on what was drafted. In dynamic mode a drafted
    layer keeps fewer beams, drafted or recovered; the bonus layer has all of them again.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.row = block.row
        self.rules = block.row.request.rules
        self.config = block.row.request.config
        self.result = Verification(block.row.live, torch.empty(0))
        forest = block.row.forest
        self.parents = forest.parents[: forest.size]
        self._tokens_V = torch.arange(self.rules.vocab_size, device=forest.device) if self.config.do_sample else None

    @property
    def can_look_ahead(self) -> bool:
        """Whether it is worth it, no width waits for the host, and no stateful rule would see beams that never were."""
        rules_of_width = self.config.width_mode == "dynamic" and any(layer.plan.rule for layer in self.block.layers)
        return not reads_are_free(self.parents.device) and self.rules.stateless and not rules_of_width

    def look_ahead(self) -> list[_Look]:
        """The beam steps of all layers, on the device."""
        beams, looks = self.row.live, []
        for index in range(len(self.block.layers)):
            look = self._look(beams, index)
            looks.append(look)
            beams = self._follow(beams, look, self._width(index))
        return [*looks, self._look(beams, len(self.block.layers))]

    def learn_parents(self, parents: Sequence[float]) -> None:
        """The host knows the forest as it was before this block ends."""
        end = self.block.layers[0].first_node if self.block.layers else len(parents)
        self.result.known = [int(node) for node in parents], list(range(end - len(self.row.live), end))

    def run(self, looks: Sequence[_Look]) -> Verification:
        """The block, with the layers that were computed ahead or layer by layer."""
        while True:
            index = len(self.result.layers)
            look = looks[index] if looks else self._look(self.result.live, index)
            if self._take(look, index):
                return self.result

    def _look(self, beams: Beams, index: int) -> _Look:
        log_probs = self.rules.log_probs(beams.sequences_LT, self.block.logits_at(beams.nodes_L))
        drawn, stopped = draw_beams(
            beams.scores_L,
            log_probs,
            None if self._tokens_V is None else gumbel_where(beams.paths_L, self._tokens_V, log_probs),
            self._keep(self.config.num_beams),
            partial(self.rules.stops, beams.sequences_LT),
        )
        nodes = None
        if index < len(self.block.layers):
            nodes = self.row.forest.find_children(beams.nodes_L[drawn.parents_K], drawn.tokens_K)
        return _Look(log_probs, drawn, stopped, nodes)

    def _follow(self, beams: Beams, look: _Look, width: int) -> Beams:
        """The beams after a layer, of which those beyond the first live ones, and those not drafted, mean nothing."""
        assert look.nodes_K is not None
        index = live_candidates(look.drawn, look.stopped_K, width, self._keep(width))
        chosen = look.drawn.pick(index)
        scores = chosen.scores_K.masked_fill(look.stopped_K[index], float("-inf"))
        nodes = torch.where(look.nodes_K[index] < 0, self.row.live.nodes_L[0], look.nodes_K[index])
        return beams.advance(chosen.parents_K, chosen.tokens_K, scores, nodes)

    def _take(self, look: _Look, index: int) -> bool:
        """Settle a layer; whether the block ends there."""
        scores, stopped, parents, *nodes = look.answers or read(look.questions)
        beams, num_beams = self.result.live, self.config.num_beams
        self.result.log_probs_LV = look.log_probs_LV[: len(beams)]
        selection = full = settle_beams(look.drawn, scores, [bool(stop) for stop in stopped], num_beams)
        if not nodes:
            outcome = LayerOutcome(full, False, False, [], num_beams)
        else:
            width = self._width(index)
            if width < num_beams:
                selection = full.at_width(width, self._keep(width))
            found = [int(node) for node in nodes[0][: len(full.drawn)]]
            covered = min((found[number] for number in selection.live_index), default=-1) >= 0
            outcome = LayerOutcome(full, covered, True, found, width)
        return self.result.advance(self.row, outcome, selection, [int(parent) for parent in parents])

    def _keep(self, width: int) -> int:
        return candidates_to_keep(width, self.config.num_beams, self.rules.n_eos)

    def _width(self, index: int) -> int:
        layer = self.block.layers[index]
        return layer_width(self.config, layer.plan, partial(self._compare, index))

    def _compare(self, index: int) -> Joint:
        """Compare target and draft at the layer that is being settled."""
        beams, layers = self.result.live, self.block.layers
        weights = self.rules.log_weights(beams.scores_L, self.result.log_probs_LV)
        p_LV = torch.softmax(weights.view(-1), dim=0).view_as(weights).double()
        # the node of the draft's parent 0
        origin = self.row.live.nodes_L[0] if index == 0 else layers[index - 1].first_node
        return make_joint(p_LV, layers[index].weigh(), layers[index].token_ids_V, beams.nodes_L - origin)
