"""The paper's method beside ours: quality and speed of exact and dynamic widths, both verifications, both memories.

    python -m beamwise.benchmarks.paper_table --prompts held_out.jsonl --num-beams 4

One process, prompt by prompt, the order of the settings rotating. Prints markdown: tokens per second (of one beam's
length), mean acceptance length, mean width, peak KV slots, mean log-likelihood per token of the best sequence under the
float32 target without warping, exact match and F1 where prompts have an answer that is not a number, GSM8K's accuracy,
and the acceptance length that the paper's Theorem 3.2 expects (of blocks that could all draft to the full depth).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from beamwise.api import SpeculativeBeams
from beamwise.benchmarks.answers import exact_match, f1, final_number, mean_log_likelihood, number_correct
from beamwise.commands.loading import Models, load_models, silence_libraries
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.joint import Joint
from beamwise.decoding.models import load_model
from beamwise.decoding.paper_width import PaperWidth, accept_probabilities
from beamwise.decoding.prompts import Prompt, encode_prompt, read_prompts
from beamwise.decoding.stats import DecodeStats
from beamwise.decoding.widths import FixedWidth

COLUMNS = (
    "tokens/s",
    "acceptance length",
    "mean width",
    "peak slots",
    "log-likelihood",
    "exact match",
    "F1",
    "GSM8K",
    "Theorem 3.2",
)


class Theorem:
    """An observer for the paper's Theorem 3.2: (1 - b^(gamma+1)) / (1 - b) layers a block, b = min(t, beta).

    Args:
        threshold: t.
        min_width: beta is the probability that so many beams are accepted, averaged over the drafted layers.
        gamma: layers drafted.
    """

    def __init__(self, threshold: float, min_width: int, gamma: int) -> None:
        self.threshold, self.min_width, self.gamma = threshold, min_width, gamma
        self._joints: list[tuple[Joint, int]] = []
        self._betas: list[float] = []

    def __call__(self, record: BlockRecord) -> None:
        """Keep what the probability is computed from; that is done after the clock has stopped."""
        outcomes = record.verification.layers
        self._joints += [
            (outcome.joint, len(layer.candidates))
            for outcome, layer in zip(outcomes, record.layers, strict=False)
            if outcome.joint is not None
        ]

    def settle(self) -> None:
        """Compute the probabilities of what was observed."""
        self._betas += [accept_probabilities(*pair, self.min_width)[-1] for pair in self._joints]
        self._joints.clear()

    def expected_length(self) -> float:
        """The theorem's layers per block."""
        share = min(self.threshold, sum(self._betas) / len(self._betas))
        return (1.0 - share ** (self.gamma + 1)) / (1.0 - share)


@dataclass
class Setting:
    """A row of the table: a decoder, its number of beams, and what it has done so far."""

    name: str
    beams: SpeculativeBeams
    num_beams: int
    seconds: float = 0.0
    tokens: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)
    likelihoods: list[float] = field(default_factory=list)
    matches: list[float] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    theorem: Theorem | None = None

    def row(self) -> str:
        """The table's row, without what belongs to the whole table."""

        def mean(values: Sequence[float]) -> str:
            return f"{sum(values) / len(values):.3f}" if values else "-"

        stats = self.stats
        cells = [
            f"{self.tokens / self.seconds:.1f}",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.mean_width:.2f}",
            str(stats.peak_slots),
            mean(self.likelihoods),
            mean(self.matches),
            mean(self.overlaps),
            mean(self.numbers),
            "-" if self.theorem is None else f"{self.theorem.expected_length():.2f}",
        ]
        return f"| {self.name} | {' | '.join(cells)} |"


def make_settings(models: Models, num_beams: int, gamma: int, draft_width: int, controller: str) -> list[Setting]:
    """All rows of the table."""
    fixed, draft = FixedWidth(gamma, draft_width), models.draft
    settings = [
        Setting(f"target only, {w} beam{'s' * (w > 1)}", SpeculativeBeams(drafter="none", seed=0), w)
        for w in (1, 2, 4)
        if w <= num_beams
    ]
    for verification in ("coupled", "rejection"):
        both: dict[str, Any] = {"seed": 0, "verification": verification}
        settings.append(Setting(f"{verification}, exact", SpeculativeBeams(draft, policy=fixed, **both), num_beams))
        for threshold in (0.5, 0.7, 0.9):
            for least in (1, 2):
                theorem = Theorem(threshold, least, gamma) if verification == "rejection" else None
                beams = SpeculativeBeams(
                    draft,
                    policy=PaperWidth(gamma, draft_width, threshold),
                    width_mode="dynamic",
                    min_width=least,
                    observer=theorem,
                    **both,
                )
                name = f"{verification}, paper's rule, t={threshold}, min {least}"
                settings.append(Setting(name, beams, num_beams, theorem=theorem))
        for name, policy in (("fixed", fixed), ("paper's rule, t=0.7", PaperWidth(gamma, draft_width, 0.7))):
            beams = SpeculativeBeams(draft, policy=policy, width_mode="dynamic", carry_beams=1, **both)
            settings.append(Setting(f"{verification}, {name}, carry 1", beams, num_beams))
    paper: dict[str, Any] = {"verification": "rejection", "law": "replacement", "warping": "joint", "seed": 0}
    beams = SpeculativeBeams(draft, policy=PaperWidth(gamma, draft_width, 0.7), width_mode="dynamic", **paper)
    settings.append(Setting("rejection as in the paper (replacement, joint), t=0.7", beams, num_beams))
    for quality in (0.0, 0.3, 0.5, 0.7, 0.9) if controller != "none" else ():
        beams = SpeculativeBeams(draft, controller=controller, seed=0, width_mode="dynamic", quality=quality)
        settings.append(Setting(f"coupled, learned widths, quality {quality}", beams, num_beams))
    if controller != "none":
        beams = SpeculativeBeams(draft, controller=controller, seed=0)
        settings.append(Setting("coupled, learned, exact", beams, num_beams))
    return settings


def run(setting: Setting, models: Models, scorer: PreTrainedModel, prompt: Prompt, arguments: dict[str, Any]) -> None:
    """Decode one prompt and score it."""
    ids = encode_prompt(models.tokenizer, prompt.text)
    inputs = torch.tensor([ids], device=models.target.device)
    start = time.perf_counter()
    output = models.target.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        num_beams=setting.num_beams,
        custom_generate=setting.beams,
        **arguments,
    )
    new = output[0, len(ids) :].tolist()  # waits for the device
    setting.seconds += time.perf_counter() - start
    if setting.theorem is not None:
        setting.theorem.settle()
    setting.tokens += setting.beams.stats.layers
    setting.stats.add(setting.beams.stats)
    setting.likelihoods.append(mean_log_likelihood(scorer, ids, new))
    answer, text = prompt.record.get("answer"), str(models.tokenizer.decode(new, skip_special_tokens=True))
    if answer is None:
        return
    if final_number(str(answer)) is not None and str(prompt.record.get("category")) == "gsm8k":
        setting.numbers.append(number_correct(text, str(answer)))
    else:
        setting.matches.append(exact_match(text, str(answer)))
        setting.overlaps.append(f1(text, str(answer)))


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--draft-width", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--controller", default="none")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    silence_libraries()
    models = load_models("smollm2-135m", "default", "auto", options.dtype, "auto")
    scorer = load_model("smollm2-135m", dtype="float32")[0]
    prompts = read_prompts(options.prompts)
    settings = make_settings(models, options.num_beams, options.gamma, options.draft_width, options.controller)
    arguments = {"do_sample": True, "top_k": options.top_k, "max_new_tokens": options.max_new_tokens}
    for setting in settings:  # warm up
        run(Setting("warm-up", setting.beams, setting.num_beams), models, scorer, prompts[0], arguments)
    for number, prompt in enumerate(prompts):
        shift = number % len(settings)
        for setting in settings[shift:] + settings[:shift]:
            run(setting, models, scorer, prompt, arguments)
    print(f"W = {options.num_beams}, gamma {options.gamma}, draft width {options.draft_width}, {len(prompts)} prompts")
    print(f"\n| setting | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    print("\n".join(setting.row() for setting in settings))


if __name__ == "__main__":
    main()
