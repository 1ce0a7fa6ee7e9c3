"""``beamwise simulate``: tokens per second of every policy on hardware that need not be there, from traces.

`replay` says how many layers a block of a policy advances and what it costs. Here blocks follow each other until a
prompt's positions are decoded: the first one also reads the prompt, and near the end no block drafts deeper than what
is left. A prompt's blocks are taken to be independent draws of the same law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from beamwise.controller.checkpoint import Controller
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import InputError
from beamwise.decoding.trace import read_blocks

from .evaluate import LEAST_BLOCKS, GroupResult, evaluate_group, training_split
from .replay import LoggedBlock, Replayed, load_blocks
from .rows import SPLITS

PromptChoice = Literal["test", "all"]
"""Which prompts of the traces count: those that the controller was not trained on, or all."""


@dataclass(frozen=True)
class PromptShape:
    """A prompt as the clock sees it.

    Attributes:
        tokens: of the prompt.
        positions: decoded after it; all beams together count once.
    """

    tokens: int
    positions: int


@dataclass(frozen=True)
class Prediction:
    """What a policy is predicted to do, over the prompts of a group.

    Attributes:
        policy: off, fixed GAMMAxM, learned or oracle.
        tokens_per_second: positions over seconds, the reading of the prompts counted.
        block: the mean block, without the reading of prompts.
    """

    policy: str
    tokens_per_second: float
    block: Replayed


@dataclass(frozen=True)
class SimulatedGroup:
    """One kind of decoding.

    Attributes:
        prompts: that were decoded.
        predictions: off first, then every fixed setting, learned, oracle.
        chosen: name of the fixed setting that a user would choose: the fastest on the prompts for that.
    """

    prompts: Sequence[PromptShape]
    predictions: Sequence[Prediction]
    chosen: str

    def of(self, policy: str) -> Prediction | None:
        """A policy's prediction, None where there is none."""
        return next((one for one in self.predictions if one.policy == policy), None)


@dataclass(frozen=True)
class Simulation:
    """Predictions by kind of decoding, and for which device."""

    device: str
    groups: dict[str, SimulatedGroup]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "device": self.device,
            "groups": {
                name: {
                    "prompts": len(group.prompts),
                    "best_fixed": group.chosen,
                    "policies": {
                        one.policy: {
                            "tokens_per_second": one.tokens_per_second,
                            "over_off": one.tokens_per_second / group.predictions[0].tokens_per_second,
                            "layers_per_block": one.block.layers,
                            "drafted_per_block": one.block.depth,
                            "ms_per_block": one.block.ms,
                        }
                        for one in group.predictions
                    },
                }
                for name, group in self.groups.items()
            },
        }

    def markdown(self, grid: bool = False) -> str:
        """One table: a line per kind of decoding and policy.

        Args:
            grid: every fixed setting, not only the chosen one.
        """
        lines = [
            f"Predicted for {self.device or 'a device without a name'}:\n",
            "| decoding | policy | tokens/s | over off | layers/block | drafted | ms/block |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, group in self.groups.items():
            base = group.predictions[0].tokens_per_second
            for one in group.predictions:
                if grid or not one.policy.startswith("fixed") or one.policy == group.chosen:
                    lines.append(
                        f"| {name} | {one.policy} | {one.tokens_per_second:.2f} | {one.tokens_per_second / base:.3f} | "
                        f"{one.block.layers:.3f} | {one.block.depth:.2f} | {one.block.ms:.2f} |"
                    )
        return "\n".join(lines) + "\n"


def simulate(
    folders: Sequence[str],
    controller: Controller,
    profile: LatencyProfile,
    prompts: PromptChoice = "test",
    new_tokens: int | None = None,
) -> Simulation:
    """Predict the speed of every policy, in exact mode.

    Args:
        folders: trace folders.
        controller: to plan with; its plan is made anew for the profile.
        profile: of the device.
        prompts: which ones of the traces.
        new_tokens: positions of every prompt; None takes what the traces decoded.

    Raises:
        FormatError: damaged or foreign traces.
        InputError: too few blocks.
    """
    fractions, seed = training_split(controller)
    train: list[tuple[LoggedBlock, PromptShape]] = []
    test: list[tuple[LoggedBlock, PromptShape]] = []
    for folder in folders:
        shapes = prompt_shapes(folder)
        for split in SPLITS:
            blocks = [(_steady(block), shapes[block.prompt]) for block in load_blocks([folder], split, fractions, seed)]
            train += blocks if split == "train" or prompts == "all" else []
            test += blocks if split == "test" or prompts == "all" else []
    groups = {}
    for name in sorted({block.group for block, _ in test}):
        # deepest first, as `replay` wants them
        chosen_on, judged_on = (
            sorted((block for block, _ in some if block.group == name), key=lambda block: -len(block.needed))
            for some in (train, test)
        )
        if min(len(chosen_on), len(judged_on)) >= LEAST_BLOCKS:
            shapes_of = {id(shape): shape for block, shape in test if block.group == name}
            wanted = [PromptShape(one.tokens, new_tokens or one.positions) for one in shapes_of.values()]
            one = judged_on[0]
            prices = profile.when_sampling(one.num_beams) if one.do_sample else profile
            groups[name] = predict_group(evaluate_group(chosen_on, judged_on, controller, prices), wanted, prices)
    if not groups:
        raise InputError(f"{', '.join(folders)}: fewer than {LEAST_BLOCKS} blocks of any kind: collect more traces")
    return Simulation(profile.device, groups)


def prompt_shapes(folder: str) -> dict[str, PromptShape]:
    """Length of every prompt of a trace folder, and the positions decoded.

    Raises:
        FormatError: damaged or foreign traces.
    """
    tokens: dict[str, int] = {}
    positions: dict[str, int] = {}
    for batch in read_blocks(folder, ("prompt", "block", "target_tokens", "nodes", "layers")):
        for row in batch.to_pylist():
            name = row["prompt"]
            if row["block"] == 0:  # the target's first forward is over the prompt and what was drafted after it
                tokens[name] = row["target_tokens"] - row["nodes"]
            positions[name] = positions.get(name, 0) + row["layers"]
    return {name: PromptShape(tokens.get(name, 1), count) for name, count in positions.items()}


def _steady(block: LoggedBlock) -> LoggedBlock:
    """A block without the reading of the prompt: its one live beam is then the only root."""
    return dataclasses.replace(block, roots=1) if block.roots > block.num_beams else block


def predict_group(result: GroupResult, prompts: Sequence[PromptShape], profile: LatencyProfile) -> SimulatedGroup:
    """Speeds of one kind of decoding.

    Args:
        result: of its blocks, from `evaluate_group`.
        prompts: that are decoded.
        profile: that the result was priced with.
    """
    blocks = {"off": result.off, **{f"fixed {name}": block for name, block in result.grid.items()}}
    blocks |= {"learned": result.learned, "oracle": result.oracle}
    predictions = [Prediction(name, predict_rate(block, prompts, profile), block) for name, block in blocks.items()]
    return SimulatedGroup(prompts, predictions, f"fixed {result.setting}")


def predict_rate(block: Replayed, prompts: Sequence[PromptShape], profile: LatencyProfile) -> float:
    """Positions per second over prompts that are decoded one after the other.

    Args:
        block: mean block of a policy.
        prompts: that are decoded.
        profile: of the device.
    """
    ms_by_positions = decoding_ms(block, max(one.positions for one in prompts))
    seconds = 0.0
    for one in prompts:
        reading = profile.target(one.tokens) - profile.target(1)
        if block.depth > 0.0:
            reading += profile.draft(one.tokens) - profile.draft(1)
        seconds += 1e-3 * (profile.call_ms + reading + float(ms_by_positions[one.positions]))
    return sum(one.positions for one in prompts) / seconds


def decoding_ms(block: Replayed, positions: int) -> np.ndarray:
    """Expected milliseconds of decoding 0, 1, … positions, float (positions + 1,).

    With n positions left a block drafts n - 1 layers at most, since the last position is always the target's own.
    """
    tails = np.asarray((1.0, *block.tails))  # share of the blocks that advance at least 1, 2, … layers
    base_ms = block.ms - sum(block.layer_ms)
    expected = np.zeros(positions + 1)
    for left in range(1, positions + 1):
        deepest = min(left - 1, len(block.tails))
        at_least = tails[: deepest + 1]
        exactly = at_least - np.append(at_least[1:], 0.0)
        after = expected[left - 1 - np.arange(deepest + 1)]
        expected[left] = base_ms + sum(block.layer_ms[:deepest]) + float(exactly @ after)
    return expected
