"""Rejection verification: the paper's (§3.1, Algorithm 1), with the ratio the right way up and q renormalised.

A layer's beams are draws ("slots") from the target's joint distribution p over (beam, token). The draft's candidates
x_1, x_2, … are draws without replacement from its own joint q. Each is offered to the open slot, whose residual r
starts at p: it is accepted with probability min(1, r(x) / q_j(x)), where q_j is q renormalised without the candidates
before it; otherwise r becomes norm(max(r - q_j, 0)). A slot whose candidates run out is drawn from its residual, and
further slots from p (`acceptance` does the arithmetic). docs/exactness.md has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .acceptance import accept_candidates, draw_slots
from .beams import NAN_LOGITS, Beams, Candidates, make_selection
from .config import DecodeConfig
from .drafting import DraftedLayer
from .errors import NumericalError
from .joint import Joint, make_joint
from .noise import private_path, root_path, uniform
from .outcome import LayerOutcome, Verification, layer_width
from .rows import Row


@dataclass(frozen=True)
class _Target:
    """The target's side of one layer. L slots on U distinct nodes.

    Attributes:
        accumulated_LV: float32 (L, V), scores of all continuations.
        p_UV: float64 (U, V), the joint probabilities by node.
        first_U: a slot of each node.
    """

    accumulated_LV: torch.Tensor
    p_UV: torch.Tensor
    first_U: list[int]


def _target_side(row: Row, beams: Beams, log_probs_LV: torch.Tensor) -> _Target:
    weights = row.request.rules.log_weights(beams.scores_L, log_probs_LV)
    best = float(weights.max())
    if best != best:
        raise NumericalError(NAN_LOGITS)
    p_LV = torch.softmax(weights.view(-1), dim=0).view_as(weights).double()
    if best == float("-inf"):  # the processors exclude everything
        p_LV = torch.zeros_like(p_LV)
    nodes = beams.nodes_L.tolist()
    first = {node: nodes.index(node) for node in nodes}  # independent slots may share a node
    p_UV = p_LV
    if len(first) < len(nodes):
        group = torch.tensor([list(first).index(node) for node in nodes], device=p_LV.device)
        p_UV = p_LV.new_zeros(len(first), p_LV.shape[1]).index_add_(0, group, p_LV)
    return _Target(log_probs_LV + beams.scores_L.unsqueeze(1), p_UV, list(first.values()))


def verify_rejection(
    row: Row, layers: Sequence[DraftedLayer], logits_at: Callable[[torch.Tensor], torch.Tensor]
) -> Verification:
    """Accept or reject the candidates layer by layer, until a layer's slots are not all filled (§3.1).

    The last layer of a block, open (recovered) or beyond the drafted ones (bonus), is completed by the target.

    Args:
        row: the prompt; its forest gets the next live beams, its finished hypotheses are updated.
        layers: what was drafted.
        logits_at: maps node indices (L,) to the target's logits (L, V) there.

    Returns:
        The beams after the block, and what happened at each layer.

    Raises:
        NumericalError: NaN logits.
    """
    request, block = row.request, Verification(row.live, torch.empty(0))
    origin = int(row.live.nodes_L[0])  # the node of the draft's parent 0
    while True:
        beams, number = block.live, len(block.layers)
        block.log_probs_LV = request.rules.log_probs(beams.sequences_LT, logits_at(beams.nodes_L))
        target = _target_side(row, beams, block.log_probs_LV)
        path = _layer_path(row, number)
        if number == len(layers):
            slots = _draw_bonus(request.config, target, path)
        else:
            slots = _verify_layer(request.config, layers[number], beams.nodes_L - origin, target, path)
            origin = layers[number].first_node
        outcome = _outcome(row, beams, target, slots)
        if block.advance(row, outcome, outcome.selection):
            return block


@dataclass(frozen=True)
class _Slots:
    """A layer's slots.

    Attributes:
        drawn: flat (node, token) indices into the U x V, in the order in which the slots were filled.
        nodes: of the accepted ones, which come first.
        covered: all were accepted.
        width: slots asked for.
        joint: p and q of a drafted layer.
    """

    drawn: list[int]
    nodes: list[int]
    covered: bool
    width: int
    joint: Joint | None = None


def _draw_bonus(config: DecodeConfig, target: _Target, path: torch.Tensor) -> _Slots:
    """The layer after the drafted ones: all slots are the target's."""
    uniforms = uniform(path, torch.arange(config.num_beams, device=path.device))[0].tolist()
    return _Slots(draw_slots(target.p_UV.view(-1), uniforms, config.law == "distinct"), [], False, config.num_beams)


def _verify_layer(
    config: DecodeConfig, layer: DraftedLayer, parents_L: torch.Tensor, target: _Target, path: torch.Tensor
) -> _Slots:
    """One drafted layer: offer its candidates, then let the target fill what is open."""
    distinct = config.law == "distinct"
    p_UV = target.p_UV
    parents_U = parents_L[target.first_U]
    joint = make_joint(p_UV, layer.weigh(), layer.token_ids_V, parents_U)
    width = layer_width(config, layer.plan, lambda: joint)
    places, q_M = _places(layer, joint, parents_U)
    uniforms = uniform(path, torch.arange(width + len(places), device=path.device))[0].tolist()
    offered = accept_candidates(joint, places, q_M, uniforms[width:], width, distinct)
    tokens = layer.candidates.tokens_K.tolist()
    drawn = [places[index] // joint.columns * p_UV.shape[1] + tokens[index] for index in offered.accepted]
    nodes = [layer.first_node + index for index in offered.accepted]
    if offered.residual_N is None:
        return _Slots(drawn, nodes, True, width, joint)
    residual_UV = p_UV.clone()
    columns = slice(None) if layer.token_ids_V is None else layer.token_ids_V
    residual_UV[:, columns] = offered.residual_N.view(-1, joint.columns)
    drawn += draw_slots(residual_UV.view(-1), uniforms[:1], distinct)
    rest = p_UV.flatten()
    if distinct:
        rest = rest.index_fill(0, torch.tensor(drawn, device=rest.device), 0.0)
    drawn += draw_slots(rest, uniforms[len(drawn) : width], distinct)
    return _Slots(drawn, nodes, False, width, joint)


def _places(layer: DraftedLayer, joint: Joint, parents_U: torch.Tensor) -> tuple[list[int], list[float]]:
    """Place of each candidate among the joint's N (-1: its parent is not live), and its probability under q."""
    candidates = layer.candidates
    columns_M = candidates.tokens_K
    if layer.token_ids_V is not None:
        columns_M = (layer.token_ids_V == candidates.tokens_K.unsqueeze(1)).int().argmax(dim=1)
    is_parent_MU = candidates.parents_K.unsqueeze(1) == parents_U
    live_M, row_M = is_parent_MU.max(dim=1)
    places_M = torch.where(live_M, row_M * joint.columns + columns_M, -1)
    log_q_M = layer.weigh()[candidates.parents_K, columns_M].double() - joint.log_total
    return places_M.tolist(), log_q_M.exp().tolist()


def _layer_path(row: Row, number: int) -> torch.Tensor:
    """Hash of a layer's random numbers, its own for every prompt, block and layer."""
    request = row.request
    root = root_path(request.config.seed, request.stream, row.forest.device)
    return private_path(private_path(root, row.history.blocks), number)


def _outcome(row: Row, beams: Beams, target: _Target, slots: _Slots) -> LayerOutcome:
    vocab = target.p_UV.shape[1]
    device = beams.scores_L.device
    parents = torch.tensor([target.first_U[flat // vocab] for flat in slots.drawn], dtype=torch.int64, device=device)
    tokens = torch.tensor([flat % vocab for flat in slots.drawn], dtype=torch.int64, device=device)
    scores = target.accumulated_LV[parents, tokens]
    drawn = Candidates(scores, scores, parents, tokens)
    stopped = row.request.rules.stops(beams.sequences_LT, parents, tokens).tolist() if slots.drawn else []
    selection = make_selection(drawn, scores.tolist(), stopped, len(slots.drawn))
    nodes = slots.nodes + [-1] * (len(slots.drawn) - len(slots.nodes)) if slots.joint is not None else []
    return LayerOutcome(selection, slots.covered, slots.joint is not None, nodes, slots.width, slots.joint)
