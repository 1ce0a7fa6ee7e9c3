"""The public decoder: `decoding.generate.SpeculativeBeams`, and by name the controllers that it may plan with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .commands.loading import load_draft_model, shipped_controller, shipped_draft
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


def shipped_beams(model: Any, name: str = "smollm2-135m", **settings: Any) -> SpeculativeBeams:
    """`SpeculativeBeams` with the draft and the controller that are shipped for a target.

    The controller plans for at most 4 beams; for more, pass ``controller=None`` and fixed widths.

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
