"""The best plans in hindsight, on logged blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from beamwise.controller.latency import LatencyProfile
from beamwise.controller.predictor import WidthPredictor

from .replay import LoggedBlock, Replayed, observation_odds, predict_blocks


def replay_oracle(
    blocks: Sequence[LoggedBlock], profile: LatencyProfile, predictor: WidthPredictor, seed: int = 0
) -> Replayed:
    """Hindsight: every block drafts just what turns out to be accepted, as deep as it pays.

    What the log does not know (how many candidates a layer would have needed that too few were drafted for, and all
    layers after it) is drawn from the predictor, so this is as good an estimate as the predictor is calibrated. Only
    blocks of the greatest depth count. Draft widths are rounded up to the edges and limited to the widest logged, as
    for every other policy.
    """
    deepest = max(len(block.needed) for block in blocks)
    blocks = [block for block in blocks if len(block.needed) == deepest]
    widest = len(observation_odds(blocks)) - 1
    edges = [edge for edge in predictor.config.edges if edge <= widest]
    generator = np.random.default_rng(seed)
    choices = []
    for block, probs_DJ in zip(blocks, predict_blocks(blocks, predictor), strict=True):
        options = [(1.0, profile.block_ms + profile.target(block.roots))]
        parents, tokens, draft_ms = block.roots, block.roots, 0.0
        for needed in _impute(block, probs_DJ[:, : len(edges)], edges, generator):
            draft_ms += profile.draft(parents) + profile.layer_ms
            parents = needed
            tokens += parents
            options.append((len(options) + 1.0, profile.block_ms + draft_ms + profile.target(tokens)))
        choices.append(options)
    rate, layers, ms = 0.0, 1.0, 1.0
    depths: list[int] = []
    for _ in range(20):  # Dinkelbach's iteration: the best rate is a fixed point
        depths = [
            max(range(len(options)), key=lambda depth, options=options: options[depth][0] - rate * options[depth][1])  # type: ignore[misc]
            for options in choices
        ]
        best = [options[depth] for options, depth in zip(choices, depths, strict=True)]
        layers, ms = (float(np.mean([option[item] for option in best])) for item in (0, 1))
        if abs(layers / ms - rate) < 1e-12:
            break
        rate = layers / ms
    tails, layer_ms = _by_layer(choices, depths, deepest)
    return Replayed(layers, layers, ms, layers - 1.0, len(choices), tails, layer_ms)


def _by_layer(
    choices: Sequence[Sequence[tuple[float, float]]], depths: Sequence[int], deepest: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Share of the blocks that chose each depth or more, and the milliseconds that each layer added to the mean."""
    tails, layer_ms = [], []
    for layer in range(deepest):
        deeper = [options for options, depth in zip(choices, depths, strict=True) if depth > layer]
        tails.append(len(deeper) / len(choices))
        layer_ms.append(sum(options[layer + 1][1] - options[layer][1] for options in deeper) / len(choices))
    return tuple(tails), tuple(layer_ms)


def _impute(
    block: LoggedBlock, probs_DJ: np.ndarray, edges: Sequence[int], generator: np.random.Generator
) -> list[int]:
    """Candidates needed (rounded up to an edge) at each layer up to the first that no edge covers."""
    path: list[int] = []
    known = True
    for logged, needed, probs_J in zip(block.draft_widths, block.needed, probs_DJ, strict=True):
        if known and needed > 0:
            column = int(np.searchsorted(edges, needed))
        else:
            tried = int(np.searchsorted(edges, logged, side="right")) if known else 0
            known = False
            failed = float(probs_J[tried - 1]) if tried else 0.0
            column = int(np.searchsorted(probs_J, failed + (1.0 - failed) * generator.random()))
            column = max(column, tried)
        if column >= len(edges):
            break
        path.append(edges[column])
    return path
