"""Ways to run the models' forwards, side by side, with transformers' beam search as the first column.

    python -m beamwise.benchmarks.runners --prompts prompts.jsonl --device cuda --runners eager,graphs

One process; for each batch size and number of beams, the ways take turns on the same prompts, after one turn that
warms up (and captures). Prints markdown: tokens per second along each beam, all prompts together. ``--energy`` adds
joules per token, read by zeus (``pip install beamwise[energy]``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.decode import pad_left
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.decoding.prompts import encode_prompt, read_prompts
from beamwise.decoding.stream import decode_stream

Meter = Callable[[Callable[[], object]], float]
"""Runs a function; its joules."""


def energy_meter() -> Meter:
    """Joules of the GPUs in use, and of the CPU where zeus can read it."""
    from zeus.monitor import ZeusMonitor  # an extra

    monitor = ZeusMonitor()

    def joules(run: Callable[[], object]) -> float:
        monitor.begin_window("run")
        run()
        return float(monitor.end_window("run").total_energy)

    return joules


def transformers_run(models: Models, tokens: list[list[int]], batch_size: int, arguments: dict[str, Any]) -> None:
    """The search of transformers itself, in batches of fixed composition."""
    for start in range(0, len(tokens), batch_size):
        inputs = pad_left(tokens[start : start + batch_size], models.target.device)
        models.target.generate(**inputs, **arguments).tolist()  # type: ignore[operator]


def beamwise_run(models: Models, beams: SpeculativeBeams, tokens: list[list[int]], arguments: dict[str, Any]) -> None:
    """A stream of prompts."""
    for _ in decode_stream(beams, models.target, map(torch.tensor, tokens), **arguments):
        pass


def compare(
    models: Models, tokens: list[list[int]], batch_size: int, num_beams: int, options: argparse.Namespace
) -> str:
    """A line of the table."""
    count = options.new_tokens
    arguments = {"num_beams": num_beams, "max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    runs: list[Callable[[], object]] = [lambda: transformers_run(models, tokens, batch_size, arguments)]
    for runner in options.runners.split(","):
        beams = SpeculativeBeams(
            models.draft, options.drafter, gamma=options.gamma, batch_size=batch_size, runner=runner
        )
        runs.append(lambda beams=beams: beamwise_run(models, beams, tokens, arguments))  # type: ignore[misc]
    joules = energy_meter() if options.energy else None
    seconds, energy = [0.0] * len(runs), [0.0] * len(runs)
    for turn in range(options.turns + 1):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            spent = 0.0
            if joules is None:
                run()
            else:
                spent = joules(run)
            if turn:
                seconds[index] += time.perf_counter() - start
                energy[index] += spent
    produced = count * len(tokens) * options.turns
    cells = [f"{produced / elapsed:.1f}" for elapsed in seconds]
    cells += [f"{spent / produced:.2f} J" for spent in energy] if options.energy else []
    return f"| {batch_size} | {num_beams} | {' | '.join(cells)} |"


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--drafter", default="model", choices=["model", "lookup", "union", "none"])
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--runners", default="eager,graphs")
    parser.add_argument("--num-beams", default="1,4,8")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--energy", action="store_true")
    options = parser.parse_args()
    silence_libraries()
    models = load_models(options.target, options.draft, options.drafter, options.dtype, options.device)
    prompts = read_prompts(options.prompts)
    tokens = [encode_prompt(models.tokenizer, prompt.text) for prompt in prompts[:: -(-len(prompts) // options.limit)]]
    columns = ["prompts at once", "beams", "transformers", *options.runners.split(",")]
    columns += [f"{name}, per token" for name in columns[2:]] if options.energy else []
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for batch_size in map(int, options.batch_sizes.split(",")):
        for num_beams in map(int, options.num_beams.split(",")):
            print(compare(models, tokens, batch_size, num_beams, options), flush=True)


if __name__ == "__main__":
    main()
