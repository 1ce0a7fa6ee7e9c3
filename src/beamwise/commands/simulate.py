"""`beamwise simulate`: what speculation would bring on a device, predicted from traces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from beamwise.decoding.errors import ConfigError

from .loading import shipped_controller
from .output import check_writable, open_output


@dataclass
class SimulateOptions:
    """Predict tokens per second of every policy on a device that need not be there, from traces.

    Nothing is decoded: what is accepted comes from the traces, milliseconds from a hardware file. Prints, for each kind
    of decoding, speculation switched off, the best fixed setting, the controller (its plan made anew for the device)
    and hindsight. Tokens are positions, as in `beamwise bench`.

    Attributes:
        traces: Folders from `beamwise collect`.
        controller: Folder or Hub id of the controller; default is the one shipped for SmolLM2.
        hardware: YAML or JSON file of the device, from `beamwise profile` or a data sheet (docs/simulator.md); without
            it, the controller's own profile.
        prompts: Predict for the prompts that the controller was not trained on (test), or for all of the traces.
        new_tokens: Positions decoded of every prompt; without it, as many as in the traces.
        grid: Print every fixed setting, not only the best.
        bench: Folder of `beamwise bench` on this device, to put measured speeds beside the predicted ones; positions
            and lengths of the prompts are then those of the benchmark.
        out: File of the figures, .json or .md.
    """

    traces: list[str]
    controller: str = "default"
    hardware: str | None = None
    prompts: Literal["test", "all"] = "test"
    new_tokens: int | None = None
    grid: bool = False
    bench: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("--traces is empty: give at least one folder of traces")
        if self.new_tokens is not None and self.new_tokens < 1:
            raise ConfigError(f"--new-tokens is {self.new_tokens}: at least 1 position must be decoded")
        if self.new_tokens is not None and self.bench is not None:
            raise ConfigError("--new-tokens and --bench exclude each other: the benchmark has its own positions")
        if self.out is not None and Path(self.out).suffix not in (".json", ".md"):
            raise ConfigError(f"--out '{self.out}': its name must end in .json or .md")


def simulate(options: SimulateOptions) -> None:
    """Run the command.

    Raises:
        ConfigError: bad options, no controller, or no latency profile.
        FormatError: damaged or foreign traces, controller, hardware file or benchmark.
        InputError: too few blocks.
    """
    from beamwise.controller.checkpoint import Controller
    from beamwise.controller.hardware import load_hardware
    from beamwise.train.simulate import simulate as predict

    check_writable(options.out)
    where = shipped_controller("smollm2-135m") if options.controller == "default" else options.controller
    if where is None:
        raise ConfigError("No controller is shipped with this installation: give one with --controller")
    controller = Controller.from_pretrained(where)
    profile = load_hardware(options.hardware) if options.hardware is not None else controller.policy().profile
    simulation = predict(options.traces, controller, profile, options.prompts, options.new_tokens)
    text, figures = simulation.markdown(options.grid), simulation.to_dict()
    if options.bench is not None:
        from beamwise.benchmarks.html import to_markdown
        from beamwise.benchmarks.simulate_check import compare_folder

        check = compare_folder(simulation, profile, Path(options.bench))
        text += "\n" + to_markdown([check.table()], Path(options.bench))
        figures["check"] = check.to_list()
    print(text, end="")
    if options.out is not None:
        with open_output(options.out) as file:
            file.write(text if options.out.endswith(".md") else json.dumps(figures, indent=2) + "\n")
