"""The whole loop at demo size: log traces on real prompts, measure this device, train a controller, export it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .collect import CollectOptions
from .collector import Collector
from .loading import ASSETS, Models
from .profile import measure_profile

if TYPE_CHECKING:
    from beamwise.controller.checkpoint import Controller

_TOKENS = [1, 2, 4, 8, 16, 32, 64, 96]
_CONFIG = Path(__file__).parent.parent / "configs" / "train.yaml"


def learn_controller(
    models: Models, folder: Path, console: Console, *, target: str, drafter: Any, num_beams: int, prompts: int
) -> Controller:
    """Collect, profile, train, export; prints a line per step.

    Args:
        models: target, tokenizer and draft.
        folder: gets ``traces``, ``profile.json`` and ``controller``.
        console: to print to.
        target: name of the target, for the record.
        drafter: name of the drafter.
        num_beams: beams of the traces.
        prompts: training prompts to decode.

    Returns:
        The exported controller, loaded from its folder.
    """
    from beamwise.controller.checkpoint import Controller
    from beamwise.train.cli import train_main

    traces, profile, out = folder / "traces", folder / "profile.json", folder / "controller"
    start = time.perf_counter()
    rows = _collect(models, traces, target, drafter, num_beams, prompts)
    console.print(f"1. collect: {rows} layers of {prompts} prompts logged, {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    measured = measure_profile(models, drafter, _TOKENS, repeats=7)
    measured.save(profile)
    console.print(
        f"2. profile: target {measured.target(4):.1f} ms for 4 tokens and {measured.target(32):.1f} ms for 32, draft "
        f"{measured.draft(8):.1f} ms for 8, {time.perf_counter() - start:.0f} s"
    )
    start = time.perf_counter()
    quiet = ["--trainer.enable_progress_bar", "false"]
    places = ["--data.traces", str(traces), "--out", str(out), "--profile", str(profile)]
    train_main(["fit", "--config", str(_CONFIG), *places, *quiet])
    controller = Controller.from_pretrained(out)
    console.print(f"3. train and export: {out}, {time.perf_counter() - start:.0f} s; its report: {out / 'report.md'}")
    return controller


def _collect(models: Models, traces: Path, target: str, drafter: Any, num_beams: int, prompts: int) -> int:
    from dataclasses import asdict

    from beamwise.decoding.prompts import read_prompts
    from beamwise.decoding.trace import TraceWriter

    options = CollectOptions(
        prompts=str(ASSETS / "chat_prompts.jsonl"),
        out=str(traces),
        run="demo",
        num_beams=[num_beams],
        sampling="greedy",
        max_new_tokens=64,
        target=target,
        drafter=drafter,
    )
    collector = Collector(models, options)
    with TraceWriter(traces, options.run, asdict(options)) as writer:
        done = writer.done_prompts()
        for index, prompt in enumerate(read_prompts(options.prompts)[:prompts]):
            if prompt.id not in done:
                log = collector.decode(index, prompt)
                writer.add_prompt(prompt.id, log.layer_rows, log.block_rows)
    return writer.rows
