"""From the engine's blocks to trace rows: an observer that keeps what one prompt's decoding saw and did."""

from __future__ import annotations

from .beams import Selection, candidates_to_keep
from .drafting import DraftedLayer
from .engine import BlockRecord
from .outcome import LayerOutcome
from .paper_width import accept_probabilities
from .trace_schema import BlockRow, LayerRow


def candidates_needed(outcome: LayerOutcome, layer: DraftedLayer, num_beams: int, n_eos: int) -> list[int]:
    """How many of a layer's candidates, in the draft's order, cover the target's selection at each width (design §5).

    Args:
        outcome: what verification found at the layer.
        layer: what was drafted there.
        num_beams: W.
        n_eos: number of EOS tokens.

    Returns:
        For w = 1..W the smallest number that covers what a step of width w lets live on (rejection verification: that
        fills w slots); 0 where the drafted ones do not.
    """
    ranks = [node - layer.first_node + 1 if node >= 0 else 0 for node in outcome.drawn_nodes]
    if outcome.joint is not None:
        return [_filled(ranks[:w], w) for w in range(1, num_beams + 1)]
    return [
        _needed(outcome.selection, ranks, w, candidates_to_keep(w, num_beams, n_eos)) for w in range(1, num_beams + 1)
    ]


def _needed(selection: Selection, ranks: list[int], width: int, keep: int) -> int:
    selected = [ranks[index] for index in selection.narrowed(width, keep)]
    return 0 if not selected or 0 in selected else max(selected)


def _accept_prob(outcome: LayerOutcome | None, layer: DraftedLayer, num_beams: int) -> list[float] | None:
    if outcome is None or outcome.joint is None:
        return None
    return accept_probabilities(outcome.joint, len(layer.candidates), num_beams)


def _filled(ranks: list[int], width: int) -> int:
    return 0 if len(ranks) < width or 0 in ranks else max(ranks)


class TraceLog:
    """An observer (`Engine`) that gathers the rows of one prompt after the other.

    Decode one prompt at a time with it: seconds are shared by the prompts of a batch.
    """

    def __init__(self) -> None:
        self.layer_rows: list[LayerRow] = []
        self.block_rows: list[BlockRow] = []
        self._draft_forwards = 0

    def begin(self) -> None:
        """A prompt begins: forget the rows of the last one."""
        self.layer_rows, self.block_rows, self._draft_forwards = [], [], 0

    def __call__(self, record: BlockRecord) -> None:
        """Take in one block."""
        row, outcomes = record.row, record.verification.layers
        config = row.request.config
        block = len(self.block_rows)
        position = record.start.sequences_LT.shape[1] - row.request.prompt_T.shape[0]
        for index, layer in enumerate(record.layers):
            outcome = outcomes[index] if index < len(outcomes) else None
            needed = (
                [] if outcome is None else candidates_needed(outcome, layer, config.num_beams, row.request.rules.n_eos)
            )
            self.layer_rows.append(
                LayerRow(
                    block=block,
                    layer=index,
                    position=position,
                    num_beams=config.num_beams,
                    width=layer.plan.width,
                    draft_width=layer.plan.draft_width,
                    drafted=len(layer.candidates),
                    reached=outcome is not None,
                    covered=outcome is not None and outcome.covered,
                    features=layer.view.features,
                    candidates_needed=needed,
                    accept_prob=_accept_prob(outcome, layer, config.num_beams),
                )
            )
        self.block_rows.append(
            BlockRow(
                block=block,
                position=position,
                num_beams=config.num_beams,
                gamma=len(record.layers),
                layers=len(outcomes),
                draft_forwards=row.stats.draft_forwards - self._draft_forwards,
                nodes=sum(len(layer.candidates) for layer in record.layers),
                target_tokens=record.target_tokens,
                slots=row.forest.num_slots,
                finished=len(row.finished.hypotheses),
                draft_s=record.seconds.get("draft", 0.0),
                target_s=record.seconds.get("target", 0.0),
                other_s=record.seconds.get("other", 0.0),
            )
        )
        self._draft_forwards = row.stats.draft_forwards
