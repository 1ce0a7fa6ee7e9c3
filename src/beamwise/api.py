"""The public decoder: `decoding.generate.SpeculativeBeams`, and by name the controllers that it may plan with."""

from __future__ import annotations

import os
from typing import Any

from .commands.loading import load_draft_model, shipped_controller, shipped_draft
from .controller.checkpoint import Controller
from .decoding import generate
from .decoding.drafter_choice import DrafterName
from .decoding.drafters import Drafter
from .decoding.errors import ConfigError


class SpeculativeBeams(generate.SpeculativeBeams):
    """Lossless speculative beam decoding as a ``custom_generate`` for ``model.generate``.

    See `decoding.generate.SpeculativeBeams` for what it keeps of ``generate``.

    Args:
        draft_model: a small causal LM with the target's vocabulary, or None.
        drafter: what proposes tokens: auto, model, lookup, union, none, or a `Drafter` of your own.
        controller: a trained width controller: a folder, a Hub id or a `Controller`; it decides how deep and how wide
            to draft. None drafts ``gamma`` layers of ``draft_width`` candidates.
        quality: with a controller and ``width_mode="dynamic"``: its price of narrow layers, from 0 (speed) to 1.
        **settings: the other arguments of `decoding.generate.SpeculativeBeams`: gamma, draft_width, policy, seed,
            batch_size, verification, width_mode, threshold, …

    Raises:
        ConfigError: a setting out of range, or both a controller and a policy.
        FormatError: a foreign, damaged or outdated controller.
        ModelError: there is no such controller.
    """

    def __init__(
        self,
        draft_model: Any = None,
        drafter: DrafterName | Drafter = "auto",
        controller: str | os.PathLike[str] | Controller | None = None,
        quality: float = 0.5,
        **settings: Any,
    ) -> None:
        if controller is not None:
            if settings.get("policy") is not None:
                raise ConfigError("controller and policy were both given: a controller is a policy, give one of them")
            loaded = controller if isinstance(controller, Controller) else Controller.from_pretrained(controller)
            mode, least = settings.get("width_mode", "exact"), settings.get("min_width", 1)
            settings["policy"] = loaded.policy(mode=mode, quality=quality, min_width=least)
        super().__init__(draft_model, drafter, **settings)


def shipped_beams(model: Any, name: str = "smollm2-135m", **settings: Any) -> SpeculativeBeams:
    """`SpeculativeBeams` with the draft and the controller that are shipped for a target.

    The controller plans for at most 8 beams; for more, pass ``controller=None`` and fixed widths.

    Args:
        model: the loaded target.
        name: of the target.
        **settings: other arguments of `SpeculativeBeams`.

    Raises:
        ConfigError: nothing is shipped for that name.
        ModelError: the model is not that target.
    """
    draft, controller = shipped_draft(name), shipped_controller(name)
    if draft is None or controller is None:
        raise ConfigError(f"No draft and controller are shipped for '{name}': distil and train your own")
    return SpeculativeBeams(load_draft_model(draft, model), **{"controller": controller, **settings})
