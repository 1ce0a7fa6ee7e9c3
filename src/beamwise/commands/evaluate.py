"""`beamwise evaluate`: replay traces under every policy, on the test prompts that the controller has not seen."""

from __future__ import annotations

import json
from dataclasses import dataclass

from beamwise.decoding.errors import ConfigError

from .loading import shipped_controller
from .output import check_writable, open_output


@dataclass
class EvaluateOptions:
    """Replay traces offline: speculation switched off, the best fixed setting, the controller and hindsight.

    Nothing is decoded: outcomes come from the traces, milliseconds from a latency profile. Prints, for each kind of
    decoding, what every policy achieves and what it was predicted to. Only test prompts count; the best fixed setting
    is chosen on training prompts.

    Attributes:
        traces: Folders from `beamwise collect`.
        controller: Folder or Hub id of the controller; default is the one shipped for SmolLM2.
        profile: Latency profile (JSON or YAML) of the device to plan for; without it, the controller's own.
        out: JSON file of the figures.
    """

    traces: list[str]
    controller: str = "default"
    profile: str | None = None
    out: str | None = None


def evaluate(options: EvaluateOptions) -> None:
    """Run the command.

    Raises:
        ConfigError: no controller, or no latency profile.
        FormatError: damaged or foreign traces, controller or profile.
        InputError: too few blocks.
    """
    from beamwise.controller.checkpoint import Controller
    from beamwise.controller.latency import LatencyProfile
    from beamwise.train.evaluate import evaluate as replay

    check_writable(options.out)
    where = shipped_controller("smollm2-135m") if options.controller == "default" else options.controller
    if where is None:
        raise ConfigError("No controller is shipped with this installation: give one with --controller")
    profile = None if options.profile is None else LatencyProfile.load(options.profile)
    outcome = replay(options.traces, Controller.from_pretrained(where), profile)
    print(outcome.markdown(), end="")
    if options.out is not None:
        with open_output(options.out) as file:
            file.write(json.dumps(outcome.to_dict(), indent=2) + "\n")
