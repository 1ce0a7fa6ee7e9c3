"""The public decoder: `decoding.generate.SpeculativeBeams`, and by name the controllers that it may plan with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .controller.checkpoint import Controller
from .decoding import generate
from .decoding.drafters import Drafter
from .decoding.engine import BlockRecord
from .decoding.errors import ConfigError
from .decoding.widths import WidthPolicy


class SpeculativeBeams(generate.SpeculativeBeams):
    """Lossless speculative beam decoding as a ``custom_generate`` for ``model.generate``.

    See `decoding.generate.SpeculativeBeams` for what it keeps of ``generate``.

    Args:
        draft_model: a small causal LM with the target's vocabulary, or None.
        drafter: what proposes tokens: auto, model, lookup, union, none, or a `Drafter` of your own.
        controller: a trained width controller: a folder, a Hub id or a `Controller`; it decides how deep and how wide
            to draft. None drafts ``gamma`` layers of ``draft_width`` candidates.
        gamma: layers drafted in one block without a controller.
        draft_width: candidates drafted at each layer without a controller; None takes ``num_beams`` + 4.
        policy: a width policy of your own, instead of a controller.
        seed: of the noise when sampling; None draws one from torch's global generator.
        batch_size: prompts decoded at once.
        observer: called after every block of every prompt.
        measure: keep wall-clock shares.

    Raises:
        ConfigError: a setting out of range, or both a controller and a policy.
        FormatError: a foreign, damaged or outdated controller.
        ModelError: there is no such controller.
    """

    def __init__(
        self,
        draft_model: Any = None,
        drafter: generate.DrafterName | Drafter = "auto",
        controller: str | os.PathLike[str] | Controller | None = None,
        gamma: int = 4,
        draft_width: int | None = None,
        policy: WidthPolicy | None = None,
        seed: int | None = None,
        batch_size: int = 8,
        observer: Callable[[BlockRecord], None] | None = None,
        measure: bool = False,
    ) -> None:
        if controller is not None:
            if policy is not None:
                raise ConfigError("controller and policy were both given: a controller is a policy, give one of them")
            loaded = controller if isinstance(controller, Controller) else Controller.from_pretrained(controller)
            policy = loaded.policy()
        super().__init__(draft_model, drafter, gamma, draft_width, policy, seed, batch_size, observer, measure)
