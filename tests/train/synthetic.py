"""Traces from a known hazard model, so that predictions can be compared with the truth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from beamwise.controller.predictor import DEFAULT_EDGES, success_from_logits
from beamwise.decoding.features import FEATURE_NAMES
from beamwise.decoding.trace import TraceWriter
from beamwise.decoding.trace_schema import BlockRow, LayerRow

DRAFT_WIDTHS = (4, 8, 16, 32, 64)
_USED = ("num_beams", "recent_acceptance", "draft_entropy", "joint_mass_8", "first_top1")


@dataclass
class SyntheticWorld:
    """Layers whose hazards depend on five features, one of them not linearly.

    Attributes:
        seed: of everything drawn.
        gamma: deepest block.
    """

    seed: int = 0
    gamma: int = 3

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def draw_features(self, num_beams: int, difficulty: float, layer: int) -> torch.Tensor:
        features = torch.randn(len(FEATURE_NAMES), generator=self.generator)
        features[FEATURE_NAMES.index("num_beams")] = float(num_beams)
        features[FEATURE_NAMES.index("layer")] = float(layer)
        features[FEATURE_NAMES.index("recent_acceptance")] += difficulty
        return features

    def true_probs(self, features_NF: torch.Tensor, max_width: int) -> torch.Tensor:
        """P(candidates needed at w <= edge), (N, W, J)."""
        columns = {name: features_NF[:, FEATURE_NAMES.index(name)] for name in _USED}
        base = columns["recent_acceptance"] - 1.5 * columns["draft_entropy"].abs() + 0.7 * columns["joint_mass_8"]
        bins = torch.linspace(0.3, -0.6, len(DEFAULT_EDGES))
        logits = base[:, None, None] + bins - 0.9 * torch.arange(max_width)[None, :, None]
        return success_from_logits(logits.expand(-1, max_width, -1))

    def draw_needed(self, features: torch.Tensor, num_beams: int) -> list[int]:
        """Candidates needed at widths 1..W, not censored; one above the last edge where no bin covers it."""
        probs = self.true_probs(features.unsqueeze(0), num_beams)[0]
        level = torch.rand(1, generator=self.generator)
        bins = (probs < level).sum(1)  # one draw for all widths: needed grows with the width
        edges = (0, *DEFAULT_EDGES, DEFAULT_EDGES[-1] + 1)
        return [int(edges[int(index) + 1]) for index in bins]

    def write(self, folder: Path, prompts: int, blocks: int = 12, beams: tuple[int, ...] = (1, 2, 4)) -> Path:
        """A trace folder: exploring draft widths, censored outcomes, layers reached only while covered."""
        with TraceWriter(folder, "synthetic", {"target": "none", "seed": self.seed}, prompts_per_shard=16) as writer:
            for prompt in range(prompts):
                difficulty = float(torch.randn(1, generator=self.generator))
                num_beams = beams[prompt % len(beams)]
                layers: list[LayerRow] = []
                for block in range(blocks):
                    layers += self._block(block, num_beams, difficulty)
                rows = [
                    BlockRow(block, 2 * block, num_beams, self.gamma, 2, 2, 16, 20, 50, 0) for block in range(blocks)
                ]
                writer.add_prompt(f"prompt {prompt}", layers, rows)
        return folder

    def _block(self, block: int, num_beams: int, difficulty: float) -> list[LayerRow]:
        rows, reached = [], True
        for layer in range(self.gamma):
            features = self.draw_features(num_beams, difficulty, layer)
            drafted = DRAFT_WIDTHS[int(torch.randint(len(DRAFT_WIDTHS), (1,), generator=self.generator))]
            needed = [n if n <= drafted else 0 for n in self.draw_needed(features, num_beams)] if reached else []
            covered = reached and needed[-1] > 0
            rows.append(
                LayerRow(
                    block, layer, 2 * block, num_beams, num_beams, drafted, drafted, reached, covered, features, needed
                )
            )
            reached = covered
        return rows
