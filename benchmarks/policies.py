"""Speculation off, fixed widths and a learned controller side by side on held-out prompts, by category.

    python -m beamwise.benchmarks.policies --prompts held_out.jsonl --controller CONTROLLER --num-beams 1,2,4

One process, prompt by prompt, the order of the policies rotating; every policy decodes the same text, so the ratio of
seconds is the ratio of tokens per second. Prints markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.decoding.prompts import Prompt, encode_prompt, read_prompts
from beamwise.decoding.widths import FixedWidth


@dataclass(frozen=True)
class Timed:
    """One prompt under one policy: seconds, layers advanced, target forwards, and the text."""

    seconds: float
    layers: int
    forwards: int
    tokens: list[int]


def decode(models: Models, beams: SpeculativeBeams, ids: list[int], arguments: dict[str, Any]) -> Timed:
    """Decode one prompt and time the whole call."""
    inputs = torch.tensor([ids], device=models.target.device)
    start = time.perf_counter()
    output = models.target.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), custom_generate=beams, **arguments
    )
    tokens = output[0, len(ids) :].tolist()  # waits for the device
    return Timed(time.perf_counter() - start, beams.stats.layers, beams.stats.target_forwards, tokens)


def compare(
    models: Models,
    policies: dict[str, SpeculativeBeams],
    prompts: Sequence[Prompt],
    arguments: dict[str, Any],
) -> dict[str, list[Timed]]:
    """Every prompt under every policy, in rotating order, after one prompt to warm up."""
    runs: dict[str, list[Timed]] = {name: [] for name in policies}
    for number, prompt in enumerate([prompts[0], *prompts]):
        ids = encode_prompt(models.tokenizer, prompt.text)
        names = list(policies)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            timed = decode(models, policies[name], ids, arguments)
            if number:
                runs[name].append(timed)
    return runs


def table(runs: dict[str, list[Timed]], prompts: Sequence[Prompt]) -> list[str]:
    """Markdown rows: per category and overall, tokens per second over those of "off"; acceptance lengths."""
    categories = sorted({str(prompt.record.get("category", "all")) for prompt in prompts})
    members = {c: [i for i, p in enumerate(prompts) if p.record.get("category", "all") == c] for c in categories}
    members["all"] = list(range(len(prompts)))
    rows = []
    for category, chosen in members.items():
        rates = {
            name: sum(timed[i].layers for i in chosen) / sum(timed[i].seconds for i in chosen)
            for name, timed in runs.items()
        }
        cells = [f"{rates[name] / rates['off']:.2f}" for name in runs]
        rows.append(f"| {category} ({len(chosen)}) | {rates['off']:.1f} | {' | '.join(cells)} |")
    lengths = [f"{sum(t.layers for t in timed) / sum(t.forwards for t in timed):.2f}" for timed in runs.values()]
    equal = [f"{sum(a.tokens == b.tokens for a, b in zip(timed, runs['off'], strict=True))}" for timed in runs.values()]
    ratios = [
        f"{statistics.median(b.seconds / a.seconds for a, b in zip(timed, runs['off'], strict=True)):.2f}"
        for timed in runs.values()
    ]
    rows.append(f"| median over prompts | | {' | '.join(ratios)} |")
    rows.append(f"| mean acceptance length | | {' | '.join(lengths)} |")
    rows.append(f"| outputs equal to off's | | {' | '.join(equal)} |")
    return rows


def main() -> None:
    """Parse the arguments and print one table per number of beams and way of decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--controller", default=None)
    parser.add_argument("--num-beams", default="1,2,4")
    parser.add_argument("--fixed", default="1x8,2x8,3x8", help="fixed settings, gamma x draft width")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sampling", default="greedy,sample")
    options = parser.parse_args()
    silence_libraries()
    models = load_models("smollm2-135m", "default", "auto", options.dtype, "auto")
    prompts = read_prompts(options.prompts)
    if options.limit:
        prompts = prompts[:: -(-len(prompts) // options.limit)]
    for sampling in options.sampling.split(","):
        for num_beams in map(int, options.num_beams.split(",")):
            policies = {"off": SpeculativeBeams(drafter="none", seed=0)}
            for setting in options.fixed.split(","):
                gamma, width = map(int, setting.split("x"))
                policies[f"fixed {setting}"] = SpeculativeBeams(models.draft, policy=FixedWidth(gamma, width), seed=0)
            if options.controller is not None:
                policies["learned"] = SpeculativeBeams(models.draft, controller=options.controller, seed=0)
            arguments = {"num_beams": num_beams, "max_new_tokens": options.max_new_tokens}
            arguments |= {"do_sample": sampling == "sample"}
            runs = compare(models, policies, prompts, arguments)
            print(f"\n{sampling}, W = {num_beams}, {options.dtype}, {len(prompts)} prompts\n")
            print(f"| category (prompts) | off, tokens/s | {' | '.join(runs)} |")
            print(f"|---|---|{'---|' * len(runs)}")
            print("\n".join(table(runs, prompts)), flush=True)


if __name__ == "__main__":
    main()
