"""What a controller's ``config.json`` says."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from beamwise.decoding.features import FEATURE_NAMES, SCHEMA_VERSION, schema_hash

from .latency import LatencyProfile
from .predictor import PredictorConfig

FORMAT = "beamwise-controller"
VERSION = 1


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("beamwise", "torch")}}


@dataclass
class ControllerInfo:
    """What a controller's ``config.json`` says besides its weights' hash.

    Attributes:
        predictor: shape of the predictor.
        profile: latency profile of the device it plans for, or None.
        models: names of target, draft and drafter whose traces it learned from.
        num_beams: numbers of beams in those traces; a policy plans for no more than the largest.
        max_draft_width: widest layer in them, or None; beyond it nothing was learned, so a policy drafts no wider.
        max_gamma: deepest block in them, or None; a policy drafts no deeper.
        other_profiles: of the same pair in other dtypes, see `Controller.add_profile`.
        metrics: measured on held-out prompts.
        training: data fingerprints and settings.
        versions: of the software that made it.
        schema: hash of the feature schema.
        schema_version: its version.
        feature_names: in order.
        format: always ``"beamwise-controller"``.
        version: of this format.
    """

    predictor: PredictorConfig
    profile: LatencyProfile | None = None
    models: dict[str, str] = field(default_factory=dict)
    num_beams: list[int] = field(default_factory=list)
    max_draft_width: int | None = None
    max_gamma: int | None = None
    other_profiles: list[LatencyProfile] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    schema: str = field(default_factory=schema_hash)
    schema_version: int = SCHEMA_VERSION
    feature_names: list[str] = field(default_factory=lambda: list(FEATURE_NAMES))
    format: str = FORMAT
    version: int = VERSION


@dataclass
class Shape:
    """`PredictorConfig` as JSON has it."""

    max_width: int
    edges: list[int]
    hidden: int
