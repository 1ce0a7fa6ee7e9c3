"""``beamwise evaluate``: predicted against achieved rate of every policy, by replaying traces offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from beamwise.controller.checkpoint import Controller
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import ConfigError, InputError
from beamwise.decoding.widths import FixedWidth

from .hindsight import replay_oracle
from .replay import LoggedBlock, Replayed, load_blocks, observation_odds, replay

LEAST_BLOCKS = 20
"""Kinds of decoding with fewer blocks than these are left out: nothing could be said about them."""


@dataclass
class GroupResult:
    """One kind of decoding (beams, greedy or sampling), on test prompts.

    Attributes:
        off: without speculation.
        fixed: the fixed setting that was best on training prompts.
        learned: the controller.
        oracle: hindsight (see `replay_oracle` for what it takes on trust).
        grid: every fixed setting, by "gamma x m".
        setting: name of the fixed setting chosen.
    """

    off: Replayed
    fixed: Replayed
    learned: Replayed
    oracle: Replayed
    setting: str
    grid: dict[str, Replayed] = field(default_factory=dict)

    @property
    def gap_closed(self) -> float:
        """Share of the gap between the better of off and fixed and the oracle that the controller closes."""
        base = max(self.off.rate, self.fixed.rate)
        return (self.learned.rate - base) / max(self.oracle.rate - base, 1e-9)


@dataclass
class Evaluation:
    """Results by kind of decoding."""

    groups: dict[str, GroupResult]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: {
                "setting": group.setting,
                "gap_closed": group.gap_closed,
                "grid": {setting: _row(result) for setting, result in group.grid.items()},
                **{policy: _row(getattr(group, policy)) for policy in ("off", "fixed", "learned", "oracle")},
            }
            for name, group in self.groups.items()
        }

    def markdown(self) -> str:
        """One table: a line per kind of decoding and policy."""
        lines = [
            "| decoding | policy | layers/block | predicted | ms/block | layers/s | predicted | over off |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, group in self.groups.items():
            for policy in ("off", "fixed", "learned", "oracle"):
                r: Replayed = getattr(group, policy)
                label = f"fixed {group.setting}" if policy == "fixed" else policy
                lines.append(
                    f"| {name} | {label} | {r.layers:.3f} | {r.expected:.3f} | {r.ms:.1f} | {r.rate:.2f} | "
                    f"{r.expected_rate:.2f} | {r.rate / group.off.rate:.3f} |"
                )
        return "\n".join(lines) + "\n"


def _row(result: Replayed) -> dict[str, float]:
    return {**vars(result), "rate": result.rate, "expected_rate": result.expected_rate}


def evaluate(
    folders: Sequence[str],
    controller: Controller,
    profile: LatencyProfile | None = None,
    fractions: Sequence[float] | None = None,
    seed: int | None = None,
) -> Evaluation:
    """Replay the test prompts of traces under every policy, in exact mode.

    Args:
        folders: trace folders.
        controller: to judge.
        profile: of the device; None takes the controller's own.
        fractions: of validation and test prompts; None takes those of the controller's training.
        seed: of the split; None takes that of the controller's training, which keeps its test prompts unseen.

    Returns:
        What each policy is estimated to achieve, and was predicted to.

    Raises:
        ConfigError: no latency profile.
        FormatError: damaged or foreign traces.
        InputError: too few blocks.
    """
    profile = profile if profile is not None else controller.info.profile
    if profile is None:
        raise ConfigError("This controller has no latency profile: measure one with beamwise profile and give it")
    trained_on = training_split(controller)
    fractions = trained_on[0] if fractions is None else fractions
    seed = trained_on[1] if seed is None else seed
    train_blocks = load_blocks(folders, "train", fractions, seed)
    test_blocks = load_blocks(folders, "test", fractions, seed)
    groups = {}
    for name in sorted({block.group for block in test_blocks}):
        train, test = ([b for b in blocks if b.group == name] for blocks in (train_blocks, test_blocks))
        if min(len(train), len(test)) >= LEAST_BLOCKS:
            groups[name] = evaluate_group(train, test, controller, profile)
    if not groups:
        raise InputError(f"{', '.join(folders)}: fewer than {LEAST_BLOCKS} blocks of any kind: collect more traces")
    return Evaluation(groups)


def training_split(controller: Controller) -> tuple[Sequence[float], int]:
    """Fractions of validation and test prompts, and the seed, of a controller's training; else those of any."""
    split = {"fractions": (0.15, 0.2), "seed": 0, **controller.info.training.get("split", {})}
    return split["fractions"], split["seed"]


def evaluate_group(
    train: list[LoggedBlock], test: list[LoggedBlock], controller: Controller, profile: LatencyProfile
) -> GroupResult:
    """Replay blocks of one kind under every policy.

    Args:
        train: blocks on which the fixed setting is chosen.
        test: blocks on which all are judged, deepest first.
        controller: to judge; its plan is made for ``profile``.
        profile: prices the plans.

    Raises:
        ConfigError: more beams than the controller has learned from.
        InputError: too few candidates were drafted to cover the beams.
    """
    network, depth, num_beams = controller.network, len(test[0].needed), test[0].num_beams
    controller.policy(profile).start_block(num_beams)  # refuses more beams than it has learned from
    most = min(len(observation_odds(train)), len(observation_odds(test))) - 1
    edges = [edge for edge in network.config.edges if edge <= most]
    wide = [edge for edge in edges if edge >= num_beams]
    if not wide:
        raise InputError(
            f"The traces drafted at most {most} candidates for {num_beams} beams: collect with wider --draft-widths"
        )
    settings = {f"{gamma}x{width}": FixedWidth(gamma, width) for gamma, width in product(range(1, depth + 1), wide)}
    off = FixedWidth(0, 1)
    rates = {name: replay(train, policy, profile, network).rate for name, policy in settings.items()}
    setting = max(rates, key=lambda name: rates[name])
    grid = {name: replay(test, policy, profile, network) for name, policy in settings.items()}
    learned = controller.policy(profile, max_gamma=depth, max_draft_width=edges[-1])
    return GroupResult(
        off=replay(test, off, profile, network),
        fixed=grid[setting],
        learned=replay(test, learned, profile, network),
        oracle=replay_oracle(test, profile, network),
        setting=setting,
        grid=grid,
    )
