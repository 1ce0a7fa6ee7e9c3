"""What the KV pool alone is worth: Beamwise without drafts against transformers' beam search.

    python -m beamwise.benchmarks.pool_speed --prompts prompts.jsonl

One process, prompt by prompt, the two taking turns to go first. Prints markdown: the median over prompts of
transformers' seconds over ours, total tokens per second, and the share of our wall time outside model forwards.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.decoding.prompts import encode_prompt, read_prompts


def seconds(models: Models, ids: list[int], arguments: dict[str, Any], beams: SpeculativeBeams | None) -> float:
    """Wall clock of one call of ``generate``."""
    inputs = torch.tensor([ids], device=models.target.device)
    chosen = {} if beams is None else {"custom_generate": beams}
    start = time.perf_counter()
    output = models.target.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), **arguments, **chosen
    )
    output.tolist()  # waits for the device
    return time.perf_counter() - start


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--num-beams", default="4,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    options = parser.parse_args()
    silence_libraries()
    prompts = read_prompts(options.prompts)
    prompts = prompts[:: -(-len(prompts) // options.limit)]
    columns = ["dtype", "beams", "prompt tokens", "transformers, tokens/s", "Beamwise, tokens/s", "ratio (median)"]
    print(f"| {' | '.join(columns)} | outside forwards |")
    print("|---" * (len(columns) + 1) + "|")
    for dtype in options.dtypes.split(","):
        models = load_models("smollm2-135m", "none", "lookup", dtype, "auto")
        tokens = [encode_prompt(models.tokenizer, prompt.text) for prompt in prompts]
        for num_beams in map(int, options.num_beams.split(",")):
            count = options.new_tokens
            arguments = {"num_beams": num_beams, "max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            beams = SpeculativeBeams(drafter="none", measure=True)
            for method in (None, beams):
                seconds(models, tokens[0], {**arguments, "max_new_tokens": 4, "min_new_tokens": 4}, method)
            before = beams.seconds
            times: dict[str, list[float]] = {"theirs": [], "ours": []}
            for number, ids in enumerate(tokens):
                order = [("theirs", None), ("ours", beams)]
                for name, method in order if number % 2 else order[::-1]:
                    times[name].append(seconds(models, ids, arguments, method))
            share = 1.0 - (beams.seconds["target"] - before["target"]) / sum(times["ours"])
            ratio = statistics.median(a / b for a, b in zip(times["theirs"], times["ours"], strict=True))
            rates = [count * len(tokens) / sum(times[name]) for name in ("theirs", "ours")]
            span = f"{min(map(len, tokens))}-{max(map(len, tokens))}"
            print(
                f"| {dtype} | {num_beams} | {span} | {rates[0]:.1f} | {rates[1]:.1f} | {ratio:.2f} | {share:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
