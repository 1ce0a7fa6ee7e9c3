"""Width policies: how deep to draft, how wide, and how many beams to keep at each layer.

A policy is asked once per layer, before that layer's candidates are drawn, and may look only at what is known then
(design: the law of the output survives any such choice). In exact mode it can change nothing but the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from .errors import ConfigError
from .joint import Joint


@dataclass(frozen=True)
class LayerPlan:
    """The widths of one layer.

    Attributes:
        width: beams that verification keeps at this layer (w). Ignored in exact mode, where it is ``num_beams``.
        draft_width: candidates to draft at this layer (m), at least 1.
        rule: decides ``width`` at verification instead, in dynamic mode.
    """

    width: int
    draft_width: int
    rule: WidthRule | None = None


class WidthRule(Protocol):
    """Decides a layer's width once the target has seen its parents. It must not look at the layer's candidates."""

    def choose(self, joint: Joint, draft_width: int, num_beams: int) -> int:
        """Beams to keep.

        Args:
            joint: target and draft distributions over (beam, token) at the layer.
            draft_width: candidates drafted (m).
            num_beams: most beams allowed (W).
        """
        ...


@dataclass
class LayerView:
    """What a policy may look at before a layer's candidates are drawn.

    Attributes:
        layer: index of the layer inside its block, from 0.
        num_beams: beams that the user asked for (W).
        num_parents: nodes that the layer's candidates will extend.
        compute_context: computes the features that are known without running the draft at this layer.
        compute_features: runs the draft, if it has not run yet, and computes all features.
        position: tokens generated so far at the block's start.
        outcomes: of the drafted layers of this prompt's last block that were reached, whether each was covered.
        notes: the policy's own, about this prompt: what it puts there it finds again in later blocks.
    """

    layer: int
    num_beams: int
    num_parents: int
    compute_context: Callable[[], torch.Tensor]
    compute_features: Callable[[], torch.Tensor]
    position: int = 0
    outcomes: Sequence[bool] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def context_features(self) -> torch.Tensor:
        """Features known before the draft runs at this layer, float32 (C,), see ``features.CONTEXT_NAMES``."""
        return self.compute_context()

    @cached_property
    def features(self) -> torch.Tensor:
        """Features once the draft has run, float32 (F,), as ``features.FEATURE_NAMES`` orders them."""
        return self.compute_features()


class BlockPlanner(Protocol):
    """Decides the layers of one block, in order. A policy makes a new one per block and prompt."""

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        """The widths of the next layer, or None to stop drafting and verify."""
        ...


@dataclass(frozen=True)
class Question:
    """What a planner wants to know from the device before it decides about a layer.

    Attributes:
        tensors: to be read.
        draft_width: most candidates that the layer may get.
        decide: takes the values of ``tensors``, flattened, and gives what `BlockPlanner.next_layer` would.
    """

    tensors: Sequence[torch.Tensor]
    draft_width: int
    decide: Callable[[Sequence[list[float]]], LayerPlan | None]


@runtime_checkable
class AskingPlanner(Protocol):
    """A planner that can leave the reading to others: where reads cost a wait, one serves all prompts of a layer."""

    def ask(self, view: LayerView) -> Question | None:
        """In place of `BlockPlanner.next_layer`: None stops at once."""
        ...


class WidthPolicy(Protocol):
    """Source of block planners."""

    def start_block(self, num_beams: int) -> BlockPlanner:
        """A planner for one block of a prompt that is decoded with ``num_beams`` beams."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    """The same gamma and draft width in every block.

    Args:
        gamma: layers drafted in one block; 0 switches speculation off.
        draft_width: candidates drafted at each layer (m).
        width: beams kept at each layer in dynamic mode; None keeps ``num_beams``.

    Raises:
        ConfigError: a value out of range.
    """

    gamma: int
    draft_width: int
    width: int | None = None

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ConfigError(f"gamma is {self.gamma}: it counts drafted layers, so it must be at least 0")
        if self.draft_width < 1:
            raise ConfigError(f"draft_width is {self.draft_width}: it must be at least 1 (gamma=0 stops drafting)")
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width is {self.width}: at least one beam must be kept")

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `WidthPolicy.start_block`."""
        return _FixedPlanner(self, num_beams)


@dataclass(frozen=True)
class _FixedPlanner:
    policy: FixedWidth
    num_beams: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if view.layer >= self.policy.gamma:
            return None
        width = self.num_beams if self.policy.width is None else min(self.policy.width, self.num_beams)
        return LayerPlan(width=width, draft_width=self.policy.draft_width)


class RandomWidth:
    """Exploration for logging runs: widths, draft widths and depths drawn at random, so that all outcomes are seen.

    Args:
        gamma: most layers in one block; the depth of each block is uniform on 1..gamma.
        draft_widths: draft widths to draw from, uniformly, layer by layer.
        seed: of the policy's own generator.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(self, gamma: int, draft_widths: tuple[int, ...], seed: int = 0) -> None:
        if gamma < 1:
            raise ConfigError(f"gamma is {gamma}: an exploring policy drafts at least 1 layer")
        if not draft_widths or min(draft_widths) < 1:
            raise ConfigError(f"draft_widths is {draft_widths}: give at least one, each at least 1")
        self.gamma = gamma
        self.draft_widths = draft_widths
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, high: int) -> int:
        """A uniform draw from 0..high-1."""
        return int(torch.randint(high, (1,), generator=self._generator))

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `WidthPolicy.start_block`."""
        return _RandomPlanner(self, num_beams, depth=1 + self.draw(self.gamma))


@dataclass(frozen=True)
class _RandomPlanner:
    policy: RandomWidth
    num_beams: int
    depth: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        if view.layer >= self.depth:
            return None
        draft_width = self.policy.draft_widths[self.policy.draw(len(self.policy.draft_widths))]
        return LayerPlan(width=1 + self.policy.draw(self.num_beams), draft_width=draft_width)


@dataclass(frozen=True)
class OracleWidth:
    """Hindsight: replays the plan that turned out to be best for one prompt (`benchmarks.oracle` finds it).

    Args:
        plans: by the number of tokens generated at a block's start: the draft widths of its layers.
    """

    plans: Mapping[int, Sequence[int]]

    def start_block(self, num_beams: int) -> BlockPlanner:
        """See `WidthPolicy.start_block`."""
        return _OraclePlanner(self.plans, num_beams)


@dataclass(frozen=True)
class _OraclePlanner:
    plans: Mapping[int, Sequence[int]]
    num_beams: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        plan = self.plans.get(view.position, ())
        return LayerPlan(self.num_beams, plan[view.layer]) if view.layer < len(plan) else None
