"""The public decoder: `decoding.generate.SpeculativeBeams`, and by name the controllers that it may plan with."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from .commands.loading import load_draft_model, shipped_controller, shipped_draft
from .controller.checkpoint import Controller
from .controller.latency import LatencyProfile
from .decoding import generate
from .decoding.drafter_choice import DrafterName
from .decoding.drafters import Drafter
from .decoding.errors import ConfigError
from .decoding.widths import WidthPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SpeculativeBeams(generate.SpeculativeBeams):
    """Lossless speculative beam decoding as a ``custom_generate`` for ``model.generate``.

    See `decoding.generate.SpeculativeBeams` for what it keeps of ``generate``.

    Args:
        draft_model: a small causal LM with the target's vocabulary, or None.
        drafter: what proposes tokens: auto, model, lookup, union, none, or a `Drafter` of your own.
        controller: a trained width controller: a folder, a Hub id or a `Controller`; it decides how deep and how wide
            to draft. None drafts ``gamma`` layers of ``draft_width`` candidates.
        profile: with a controller: the latency profile of this device, or its file from ``beamwise profile``; None
            plans by the controller's own, of the target's dtype where it has one.
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
        profile: str | os.PathLike[str] | LatencyProfile | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(draft_model, drafter, **settings)
        self._learned: Callable[[str], WidthPolicy] | None = None
        if controller is not None:
            if settings.get("policy") is not None:
                raise ConfigError("controller and policy were both given: a controller is a policy, give one of them")
            loaded = controller if isinstance(controller, Controller) else Controller.from_pretrained(controller)
            given = profile if profile is None or isinstance(profile, LatencyProfile) else LatencyProfile.load(profile)
            mode, least = settings.get("width_mode", "exact"), settings.get("min_width", 1)
            # one policy for each dtype: it remembers what it decoded
            self._learned = cache(
                lambda dtype: loaded.policy(given, dtype, mode=mode, quality=quality, min_width=least)
            )
            self._learned("")  # bad settings are refused here, not in `generate`
        elif profile is not None:
            raise ConfigError("a profile was given without a controller: fixed widths have no use for it, leave it out")

    def _default_policy(self, target: PreTrainedModel, draft_width: int) -> WidthPolicy:
        if self._learned is None:
            return super()._default_policy(target, draft_width)
        return self._learned(str(target.dtype).removeprefix("torch."))


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
