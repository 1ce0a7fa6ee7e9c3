"""Forests as pictures need them: what was drafted in each block of a prompt, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from beamwise.decoding.beams import candidates_to_keep
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.outcome import LayerOutcome

Kind = Literal["root", "accepted", "recovered", "bonus", "ended", "dead"]


@dataclass(frozen=True)
class Node:
    """A beam at a position.

    Attributes:
        column: 0 for the live beams at the block's start, else the layer, from 1.
        text: its token.
        parent: index of its parent among the block's nodes; -1 at the roots.
        kind: root; accepted (drafted, and a beam of the target); recovered (a beam of the target that was not drafted);
            bonus (of the layer after the drafted ones); ended (a beam that ended here); dead (drafted in vain).
        score: log-probability of the whole beam, by the target where it chose it, else by the draft.
    """

    column: int
    text: str
    parent: int
    kind: Kind
    score: float


@dataclass(frozen=True)
class Column:
    """What is said over a layer.

    Attributes:
        draft_width: candidates asked for (m); None where nothing was drafted.
        width: beams kept (w); None where verification did not come so far.
    """

    draft_width: int | None
    width: int | None


@dataclass(frozen=True)
class BlockPicture:
    """One block.

    Attributes:
        number: from 1.
        position: tokens generated before it.
        nodes: roots first, then layer by layer; parents before children.
        columns: of the layers, from column 1 on.
    """

    number: int
    position: int
    nodes: list[Node]
    columns: list[Column]

    @property
    def advanced(self) -> int:
        """Positions by which the search advanced."""
        return sum(column.width is not None for column in self.columns)


class ForestLog:
    """An observer of the engine that keeps the blocks of one prompt.

    Args:
        text_of: the text of a token.

    Attributes:
        blocks: so far.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self.blocks: list[BlockPicture] = []

    def __call__(self, record: BlockRecord) -> None:
        """Take in one block."""
        self.blocks.append(_Painter(record, self._text_of).picture(len(self.blocks) + 1))


class _Painter:
    """Makes the picture of one block."""

    def __init__(self, record: BlockRecord, text_of: Callable[[int], str]) -> None:
        self.record = record
        self.text_of = text_of
        self.nodes: list[Node] = []
        self.columns: list[Column] = []

    def picture(self, number: int) -> BlockPicture:
        record = self.record
        prompt = int(record.row.request.prompt_T.shape[0])
        tokens, scores = record.start.sequences_LT[:, -1].tolist(), record.start.scores_L.tolist()
        for token, score in zip(tokens, scores, strict=True):
            self.nodes.append(Node(0, self.text_of(token), -1, "root", score))
        drafted = self._drafted()
        live = list(range(len(self.nodes)))
        outcomes = record.verification.layers
        for layer in range(max(len(record.layers), len(outcomes))):
            plan = record.layers[layer].plan if layer < len(record.layers) else None
            outcome = outcomes[layer] if layer < len(outcomes) else None
            drafted_width, width = plan.draft_width if plan else None, outcome.width if outcome else None
            self.columns.append(Column(drafted_width, width))
            if outcome is not None:
                live = self._verified(layer, outcome, live, drafted)
        return BlockPicture(number, int(record.start.sequences_LT.shape[1]) - prompt, self.nodes, self.columns)

    def _drafted(self) -> dict[int, int]:
        """Add the drafted nodes, dead until proved otherwise; where each node of the forest is among ours."""
        places: dict[int, int] = {}
        first = 0
        for layer, drafted in enumerate(self.record.layers):
            start, candidates = len(self.nodes), drafted.candidates
            columns = (candidates.parents_K, candidates.tokens_K, candidates.scores_K)
            for index, (parent, token, score) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                places[drafted.first_node + index] = len(self.nodes)
                self.nodes.append(Node(layer + 1, self.text_of(token), first + parent, "dead", score))
            first = start
        return places

    def _verified(self, layer: int, outcome: LayerOutcome, live: list[int], drafted: dict[int, int]) -> list[int]:
        """Mark the beams that the target chose at a layer, and add those that were not drafted; where they are."""
        selection, request = outcome.selection, self.record.row.request
        chosen = selection.live_index
        if outcome.width < len(chosen):
            keep = candidates_to_keep(outcome.width, request.config.num_beams, request.rules.n_eos)
            chosen = selection.narrowed(outcome.width, keep)
        parents, tokens = selection.drawn.parents_K.tolist(), selection.drawn.tokens_K.tolist()
        missing: Kind = "recovered" if outcome.drafted else "bonus"

        def place(index: int, kind: Kind) -> int:
            number = drafted.get(outcome.drawn_nodes[index], -1) if outcome.drawn_nodes else -1
            parent = live[parents[index]]
            score = selection.scores[index]
            if number >= 0:
                kind, parent = "accepted", self.nodes[number].parent
                self.nodes[number] = Node(layer + 1, self.nodes[number].text, parent, kind, score)
                return number
            self.nodes.append(Node(layer + 1, self.text_of(tokens[index]), parent, kind, score))
            return len(self.nodes) - 1

        for index in selection.finished_index:
            place(index, "ended")
        return [place(index, missing) for index in chosen]
