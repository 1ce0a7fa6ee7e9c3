"""Which controller a command decodes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beamwise.decoding.errors import ConfigError

from .loading import shipped_controller

if TYPE_CHECKING:
    from .generate import GenerateOptions


def choose_controller(options: GenerateOptions) -> str | None:
    """The controller to plan with, or None for fixed widths or the paper's rule.

    Raises:
        ConfigError: a controller beside the fixed widths or the rule that it would replace.
    """
    fixed = options.gamma is not None or options.draft_width is not None or options.threshold is not None
    if fixed and options.quality is not None:
        raise ConfigError("--quality is for a controller: leave out --gamma, --draft-width and --threshold")
    if options.controller == "none":
        return None
    if options.controller != "default":
        if fixed:
            raise ConfigError("--controller replaces --gamma, --draft-width and --threshold: give one or the other")
        return options.controller
    shipped = not fixed and options.draft == "default" and options.drafter in ("auto", "union")
    controller = shipped_controller(options.target) if shipped else None
    return controller if controller is not None and options.num_beams <= controller_limit(controller) else None


def controller_limit(controller: str) -> int:
    """Most beams that a controller learnt to plan for."""
    from beamwise.controller.checkpoint import Controller

    return max(Controller.from_pretrained(controller).info.num_beams)
