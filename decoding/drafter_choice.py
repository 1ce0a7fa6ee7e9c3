"""Drafters by name."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from .drafters import Drafter, LookupDrafter, ModelDrafter, UnionDrafter
from .errors import ConfigError
from .feature_drafter import FeatureDrafter

DrafterName = Literal["auto", "model", "lookup", "union", "none"]


def make_drafter(kind: DrafterName, draft_model: PreTrainedModel | None, target: PreTrainedModel) -> Drafter | None:
    """The drafter of a name.

    Args:
        kind: ``"model"``, ``"lookup"`` (n-grams of prompt and output), ``"union"`` of both, ``"none"``, or ``"auto"``:
            the union where there is a draft model, else the lookup.
        draft_model: needed by ``"model"`` and ``"union"``.
        target: the target model.

    Raises:
        ConfigError: an unknown name, or a draft model is missing.
        ModelError: the draft's vocabulary does not fit.
    """
    if kind == "auto":
        kind = "lookup" if draft_model is None else "union"
    if kind == "none":
        return None
    if kind == "lookup":
        return LookupDrafter()
    if kind not in ("model", "union"):
        raise ConfigError(f"Unknown drafter '{kind}': use auto, model, lookup, union or none")
    if draft_model is None:
        raise ConfigError(f"drafter='{kind}' needs a draft_model; without one use drafter='lookup'")
    reads_states = getattr(draft_model, "fusion", None) is not None
    model = FeatureDrafter(draft_model, target) if reads_states else ModelDrafter(draft_model, target)
    return model if kind == "model" else UnionDrafter(model, LookupDrafter())
