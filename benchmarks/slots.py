"""The memory of beams: KV slots in use beside those of one sequence, on real prompts.

    python -m beamwise.benchmarks.slots --prompts prompts.jsonl [more.jsonl ...] --num-beams 8

Beam search without drafts; texts end where they end. Prints markdown: for each prompt the slots of the tree of live
beams over the tokens of one sequence, at the last step and averaged over all; transformers keeps num_beams times one
sequence throughout. The slots are those of the distinct prefixes of the live beams: no storage that keeps every beam
exactly has fewer.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.decoding.prompts import Prompt, encode_prompt, read_prompts


def slot_ratios(models: Models, ids: list[int], num_beams: int, new_tokens: int) -> list[float]:
    """Slots in use over the tokens of one beam, after every step of one prompt."""
    ratios: list[float] = []

    def note(record: Any) -> None:
        if not record.row.finished.done:
            ratios.append(record.row.forest.num_slots / record.row.live.sequences_LT.shape[1])

    beams = SpeculativeBeams(drafter="none", observer=note)
    inputs = torch.tensor([ids], device=models.target.device)
    models.target.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        num_beams=num_beams,
        max_new_tokens=new_tokens,
        do_sample=False,
        custom_generate=beams,
    )
    return ratios


def evenly(prompts: list[Prompt], count: int) -> list[Prompt]:
    """So many prompts of each category, evenly spaced; 0 takes all."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(str(prompt.record.get("category", "all")), []).append(prompt)
    return [prompt for kind in kinds.values() for prompt in (kind[:: -(-len(kind) // count)] if count else kind)]


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+")
    parser.add_argument("--per-category", type=int, default=2, help="prompts of each category; 0 takes all")
    parser.add_argument("--num-beams", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--target", default="smollm2-135m")
    options = parser.parse_args()
    silence_libraries()
    models = load_models(options.target, "none", "lookup", "bfloat16", "auto")
    print("| category | prompt tokens | steps | at the end | on average |\n|---|---|---|---|---|", flush=True)
    last: list[float] = []
    for prompt in evenly([prompt for path in options.prompts for prompt in read_prompts(path)], options.per_category):
        ids = encode_prompt(models.tokenizer, prompt.text)
        ratios = slot_ratios(models, ids, options.num_beams, options.new_tokens)
        if not ratios:
            continue  # over at the first step
        last.append(ratios[-1])
        kind = prompt.record.get("category", "all")
        print(f"| {kind} | {len(ids)} | {len(ratios)} | {ratios[-1]:.2f} | {statistics.mean(ratios):.2f} |", flush=True)
    low, middle, high = statistics.quantiles(last, n=4) if len(last) > 1 else last * 3
    spread = f"quartiles {low:.2f} and {high:.2f}, max {max(last):.2f}"
    print(f"\n{len(last)} prompts, at the end: median {middle:.2f}, {spread}")


if __name__ == "__main__":
    main()
