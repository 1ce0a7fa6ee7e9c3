"""Replays width policies on traces: what would each have cost and gained, had it planned the logged blocks?

The trace's own draft widths were drawn at random, so a policy that wants m candidates at a layer can be judged on those
blocks where at least m were drafted there, weighted by how rarely that happens (inverse-probability weighting). Its
depth was drawn at random too, so what happens at a layer is averaged over the blocks that were drafted as deep. Two
things are approximate: with fewer parents than were logged, a layer's candidates come in a slightly different order,
and its features differ; and a policy with running averages sees short blocks as if it had stopped there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from beamwise.controller.latency import LatencyProfile
from beamwise.controller.predictor import WidthPredictor
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.trace import read_blocks, read_layers
from beamwise.decoding.widths import LayerView, WidthPolicy

from .rows import Split, split_of

_DO_SAMPLE = FEATURE_NAMES.index("do_sample")


@dataclass(frozen=True)
class LoggedBlock:
    """One logged block of D layers, for W beams that must all be covered.

    Attributes:
        prompt: its prompt.
        num_beams: W.
        do_sample: beams were drawn.
        roots: live beams at its start: tokens of the target's forward besides the drafted ones.
        features: float32 (D, F).
        draft_widths: candidates that were drafted at each layer, (D,); a huge number where the draft had no more.
        needed: candidates needed at each layer, (D,); 0 where not covered or not reached.
    """

    prompt: str
    num_beams: int
    do_sample: bool
    roots: int
    features: torch.Tensor
    draft_widths: list[int]
    needed: list[int]

    @property
    def group(self) -> str:
        """Name of the kind of decoding."""
        return f"W={self.num_beams} {'sampling' if self.do_sample else 'greedy'}"


def load_blocks(folders: Sequence[str], split: Split, fractions: Sequence[float], seed: int) -> list[LoggedBlock]:
    """The blocks of a split's prompts that drafted anything, deepest first (so that running averages settle on them).

    Args:
        folders: trace folders.
        split: which prompts.
        fractions: of validation and test, as in training.
        seed: of the split, as in training.

    Raises:
        FormatError: damaged or foreign traces.
    """
    blocks: list[LoggedBlock] = []
    for folder in folders:
        columns = ("prompt", "block", "target_tokens", "nodes")
        roots = {}
        for batch in read_blocks(folder, columns):
            for row in batch.to_pylist():
                roots[row["prompt"], row["block"]] = row["target_tokens"] - row["nodes"]
        layers: dict[tuple[str, int], list[dict[str, object]]] = {}
        for batch in read_layers(folder):
            for row in batch.to_pylist():
                if split_of(row["prompt"], fractions, seed) == split:
                    layers.setdefault((row["prompt"], row["block"]), []).append(row)
        blocks += [_block(rows, roots[key]) for key, rows in layers.items()]
    return sorted(blocks, key=lambda block: -len(block.needed))


def _block(rows: list[dict[str, object]], roots: int) -> LoggedBlock:
    def column(name: str) -> list[object]:
        return [row[name] for row in rows]

    features = torch.tensor(column("features"), dtype=torch.float32)
    widths = [
        drafted if drafted == asked else np.iinfo(np.int32).max
        for drafted, asked in zip(column("drafted"), column("draft_width"), strict=True)
    ]
    needed = [values[-1] if values else 0 for values in column("candidates_needed")]  # type: ignore[index]
    do_sample = bool(features[0, _DO_SAMPLE] > 0.5)
    beams = int(str(rows[0]["num_beams"]))
    return LoggedBlock(str(rows[0]["prompt"]), beams, do_sample, roots, features, widths, needed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PlannedBlock:
    """What a policy planned for a logged block of D layers.

    Attributes:
        draft_widths: of the layers that it drafts (at most D).
        base_ms: of the block without any drafted layer.
        layer_ms: what each of the D layers adds, 0 where it stopped before.
        reach: probability that each of the D layers is drafted and covered, by the predictor.
    """

    draft_widths: list[int]
    base_ms: float
    layer_ms: list[float]
    reach: list[float]


def predict_blocks(blocks: Sequence[LoggedBlock], predictor: WidthPredictor) -> list[np.ndarray]:
    """P(all beams are covered) by layer and edge, float32 (D, J) for each block."""
    with torch.inference_mode():
        probs = predictor.success_probs(torch.cat([block.features for block in blocks]))
    parts = probs.split([len(block.needed) for block in blocks])  # type: ignore[no-untyped-call]
    return [part[:, block.num_beams - 1].numpy() for part, block in zip(parts, blocks, strict=True)]


def plan_block(
    block: LoggedBlock, policy: WidthPolicy, profile: LatencyProfile, probs_DJ: np.ndarray, edges: Sequence[int]
) -> PlannedBlock:
    """Let a policy plan a logged block.

    Args:
        block: the block.
        policy: its draft widths must be edges.
        profile: prices the plan.
        probs_DJ: from `predict_blocks`: says what any plan may expect.
        edges: draft widths that ``probs_DJ`` speaks of.
    """
    planner = policy.start_block(block.num_beams)
    base_ms = profile.block_ms + profile.target(block.roots)
    planned = PlannedBlock([], base_ms, [0.0] * len(block.needed), [0.0] * len(block.needed))
    reach, parents, tokens = 1.0, block.roots, block.roots
    for layer, features in enumerate(block.features):
        view = _view(block, layer, parents, features)
        plan = planner.next_layer(view)
        if plan is not None or "features" in view.__dict__:  # the draft ran
            planned.layer_ms[layer] = profile.draft(parents) + profile.layer_ms
        if plan is None:
            break
        reach *= float(probs_DJ[layer, edges.index(plan.draft_width)])
        planned.reach[layer] = reach
        parents = plan.draft_width
        planned.layer_ms[layer] += profile.target(tokens + parents) - profile.target(tokens)
        tokens += parents
        planned.draft_widths.append(parents)
    return planned


def _view(block: LoggedBlock, layer: int, parents: int, features: torch.Tensor) -> LayerView:
    return LayerView(layer, block.num_beams, parents, lambda: features[: len(CONTEXT_NAMES)], lambda: features)


@dataclass(frozen=True)
class Replayed:
    """What a policy is estimated to do per block.

    Attributes:
        layers: layers advanced per block.
        expected: layers that the predictor expected.
        ms: milliseconds per block, by the profile.
        depth: layers drafted per block.
        blocks: blocks that it planned.
        tails: share of the blocks that advance more than 1, 2, … layers.
        layer_ms: what each drafted layer adds to the block's milliseconds.
    """

    layers: float
    expected: float
    ms: float
    depth: float
    blocks: int
    tails: tuple[float, ...] = ()
    layer_ms: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Layers per second."""
        return 1e3 * self.layers / self.ms

    @property
    def expected_rate(self) -> float:
        """Layers per second that the predictor expected."""
        return 1e3 * self.expected / self.ms


def observation_odds(blocks: Sequence[LoggedBlock]) -> np.ndarray:
    """P(at least m candidates were drafted at a layer), for m = 0, 1, 2, …, float (M + 1,)."""
    logged = np.array([width for block in blocks for width in block.draft_widths])
    finite = logged[logged < np.iinfo(np.int32).max]
    most = int(finite.max()) if len(finite) else 1
    return np.array([np.mean(logged >= width) for width in range(most + 1)])


def replay(
    blocks: Sequence[LoggedBlock], policy: WidthPolicy, profile: LatencyProfile, predictor: WidthPredictor
) -> Replayed:
    """Estimate a policy on logged blocks of one kind (see the module)."""
    probs, edges = predict_blocks(blocks, predictor), predictor.config.edges
    plans = [plan_block(block, policy, profile, probs[index], edges) for index, block in enumerate(blocks)]
    odds = observation_odds(blocks)
    expected, depth = 1.0, 0.0
    tails, layer_ms = list[float](), list[float]()
    for layer in range(max(len(block.needed) for block in blocks)):
        logged = [(block, plan) for block, plan in zip(blocks, plans, strict=True) if len(block.needed) > layer]
        drafting = [(block, plan) for block, plan in logged if len(plan.draft_widths) > layer]
        follows = [_follow(block, plan.draft_widths[: layer + 1], odds) for block, plan in drafting]
        weights = sum(weight for weight, _ in follows)
        covered = sum(weight * covered for weight, covered in follows) / weights if weights > 0.0 else 0.0
        tails.append(covered * len(drafting) / len(logged))
        layer_ms.append(float(np.mean([plan.layer_ms[layer] for _, plan in logged])))
        expected += float(np.mean([plan.reach[layer] for _, plan in logged]))
        depth += len(drafting) / len(logged)
    ms = float(np.mean([plan.base_ms for plan in plans])) + sum(layer_ms)
    return Replayed(1.0 + sum(tails), expected, ms, depth, len(blocks), tuple(tails), tuple(layer_ms))


def _follow(block: LoggedBlock, widths: Sequence[int], odds: np.ndarray) -> tuple[float, bool]:
    """Weight of a block for these widths (0 where the log cannot tell), and whether all of them are covered."""
    weight = 1.0
    for width, logged, needed in zip(widths, block.draft_widths, block.needed, strict=False):
        if logged < width:
            return 0.0, False
        weight /= odds[width]
        if not 0 < needed <= width:
            return weight, False
    return weight, True
