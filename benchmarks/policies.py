"""Speculation off, fixed widths and a learned controller side by side on held-out prompts, by category.

    python -m beamwise.benchmarks.policies --prompts held_out.jsonl --controller CONTROLLER --num-beams 1,2,4

One process, prompt by prompt, the order of the policies rotating; every policy decodes the same text, so the ratio of
seconds is the ratio of tokens per second. Prints markdown. ``--oracle`` adds the best plan in hindsight (`oracle`), by
the controller's latency profile; finding it takes several more runs of every prompt, which are not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.benchmarks.oracle import Survey, best_plan
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.controller.checkpoint import Controller
from beamwise.controller.latency import LatencyProfile
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


def plan_in_hindsight(
    models: Models, ids: list[int], arguments: dict[str, Any], profile: LatencyProfile, widest: tuple[int, int]
) -> SpeculativeBeams:
    """A decoder that knows what will be accepted of this prompt."""
    survey = Survey(*widest)
    surveyor = SpeculativeBeams(models.draft, policy=survey, observer=survey, seed=0)
    layers = survey.explore(lambda: decode(models, surveyor, ids, arguments).layers)
    return SpeculativeBeams(models.draft, policy=best_plan(survey.starts, layers, profile), seed=0)


def compare(
    models: Models,
    policies: dict[str, SpeculativeBeams],
    prompts: Sequence[Prompt],
    arguments: dict[str, Any],
    oracle: Callable[[list[int]], SpeculativeBeams] | None = None,
) -> dict[str, list[Timed]]:
    """Every prompt under every policy, in rotating order, after one prompt to warm up."""
    names = [*policies, *(["oracle"] if oracle is not None else [])]
    runs: dict[str, list[Timed]] = {name: [] for name in names}
    for number, prompt in enumerate([prompts[0], *prompts]):
        ids = encode_prompt(models.tokenizer, prompt.text)
        decoders = policies if oracle is None else {**policies, "oracle": oracle(ids)}
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            timed = decode(models, decoders[name], ids, arguments)
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
    rows += [gap_row(runs)] if "oracle" in runs and "learned" in runs else []
    rows.append(f"| median over prompts | | {' | '.join(ratios)} |")
    rows.append(f"| mean acceptance length | | {' | '.join(lengths)} |")
    rows.append(f"| outputs equal to off's | | {' | '.join(equal)} |")
    return rows


def gap_row(runs: dict[str, list[Timed]]) -> str:
    """How much of the gap between the better of off and the best fixed setting and the oracle is closed."""
    rates = {name: sum(t.layers for t in timed) / sum(t.seconds for t in timed) for name, timed in runs.items()}
    base = max(rate for name, rate in rates.items() if name not in ("learned", "oracle"))
    share = (rates["learned"] - base) / (rates["oracle"] - base)
    return f"| share of the gap to the oracle that learned closes: {share:.2f} | {'| ' * (len(runs) + 1)}"


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
    parser.add_argument("--oracle", action="store_true", help="add the best plan in hindsight")
    parser.add_argument("--oracle-gamma", type=int, default=6)
    parser.add_argument("--oracle-width", type=int, default=24)
    options = parser.parse_args()
    if options.oracle and options.controller is None:
        parser.error("--oracle plans with a controller's latency profile: give --controller")
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
            oracle = None
            if options.oracle:
                profile = Controller.from_pretrained(options.controller).policy(dtype=options.dtype).profile
                widest = (options.oracle_gamma, options.oracle_width)
                oracle = partial(plan_in_hindsight, models, arguments=arguments, profile=profile, widest=widest)
            runs = compare(models, policies, prompts, arguments, oracle)
            print(f"\n{sampling}, W = {num_beams}, {options.dtype}, {len(prompts)} prompts\n")
            print(f"| category (prompts) | off, tokens/s | {' | '.join(runs)} |")
            print(f"|---|---|{'---|' * len(runs)}")
            print("\n".join(table(runs, prompts)), flush=True)


if __name__ == "__main__":
    main()
