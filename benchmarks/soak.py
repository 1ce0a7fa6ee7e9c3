"""Memory of a long run: decode mixed prompts for an hour and look at the slope.

    python -m beamwise.benchmarks.soak --minutes 60 --out runs/soak

Prompts, beams (1 to 4), greedy and sampled, lengths and seeds change from prompt to prompt, on one decoder, as in a
service. After each prompt it notes the resident memory of the process and the bytes of both KV pools in
``OUT/memory.csv``; at the end it fits a line after the warm-up, draws ``OUT/memory.png``, and ends with 1 if memory
grows by more than ``--bound`` MB/hour beyond the fit's own uncertainty (two standard errors).
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.loading import ASSETS, Models, load_models, silence_libraries
from beamwise.decoding.drafters import ModelDrafter, UnionDrafter
from beamwise.decoding.prompts import encode_prompt, read_prompts


@dataclass(frozen=True)
class Sample:
    """After one prompt.

    Attributes:
        seconds: since the start.
        rss_mb: resident memory of the process.
        pool_mb: allocated in both KV pools.
        tensors: that Python knows of; counted at every hundredth prompt, else -1.
    """

    seconds: float
    rss_mb: float
    pool_mb: float
    tensors: int


@dataclass(frozen=True)
class Slope:
    """A line fitted by least squares.

    Attributes:
        mb_per_hour: its slope.
        error: one standard error of it, as if the residuals were independent.
    """

    mb_per_hour: float
    error: float


def fit(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of values in MB over time.

    Raises:
        ValueError: fewer than three points.
    """
    count = len(seconds)
    if count < 3:
        raise ValueError(f"{count} points: no slope; decode for longer")
    mean_t, mean_v = sum(seconds) / count, sum(values) / count
    spread = sum((t - mean_t) ** 2 for t in seconds)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(seconds, values, strict=True)) / spread
    rest = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in zip(seconds, values, strict=True))
    return Slope(3600 * slope, 3600 * math.sqrt(rest / (count - 2) / spread))


def rss_mb() -> float:
    """Resident memory of this process in MB (2**20 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def pool_mb(beams: SpeculativeBeams, models: Models) -> float:
    """MB allocated in the KV pools of target and draft."""
    engine = beams.engine(models.target, 1)
    drafter = engine.drafter.model if isinstance(engine.drafter, UnionDrafter) else engine.drafter
    pools = [engine.pool, drafter.pool if isinstance(drafter, ModelDrafter) else None]
    return sum(pool.bytes for pool in pools if pool is not None) / 2**20


def decode_for(models: Models, prompts: list[list[int]], minutes: float, seed: int) -> list[Sample]:
    """Decode prompts drawn at random until the time is up."""
    rng = random.Random(seed)
    beams = SpeculativeBeams(models.draft, seed=seed)
    samples: list[Sample] = []
    start = time.perf_counter()
    while (seconds := time.perf_counter() - start) < 60 * minutes:
        ids = torch.tensor([rng.choice(prompts)], device=models.target.device)
        arguments: dict[str, Any] = {"num_beams": rng.choice((1, 2, 4)), "max_new_tokens": rng.choice((8, 24, 48))}
        beams.seed = rng.randrange(2**31)
        models.target.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=rng.random() < 0.5, custom_generate=beams, **arguments
        )
        tensors = sum(map(torch.is_tensor, gc.get_objects())) if len(samples) % 100 == 0 else -1
        samples.append(Sample(seconds, rss_mb(), pool_mb(beams, models), tensors))
    return samples


def plot(samples: Sequence[Sample], warm_up_s: float, slope: Slope, path: Path) -> None:
    """Draw memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 1))
    minutes = [sample.seconds / 60 for sample in samples]
    top.plot(minutes, [sample.rss_mb for sample in samples], linewidth=0.8)
    top.axvline(warm_up_s / 60, linestyle=":", color="grey")
    top.set_ylabel("resident memory, MB")
    top.set_title(f"{len(samples)} prompts, {slope.mb_per_hour:+.1f} ± {2 * slope.error:.1f} MB/hour after the warm-up")
    bottom.plot(minutes, [sample.pool_mb for sample in samples], color="tab:orange")
    bottom.set_ylabel("KV pools, MB")
    bottom.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; 1 where memory grows beyond the bound."""
    parser = argparse.ArgumentParser(prog="python -m beamwise.benchmarks.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=0.25, help="share of the time that is left out of the fit")
    parser.add_argument("--bound", type=float, default=20.0, help="MB per hour")
    parser.add_argument("--prompts", default=str(ASSETS / "chat_prompts.jsonl"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/soak")
    options = parser.parse_args(arguments)
    silence_libraries()
    models = load_models(options.target, options.draft, "auto", "float32", "cpu")
    prompts = [encode_prompt(models.tokenizer, prompt.text) for prompt in read_prompts(options.prompts)]
    samples = decode_for(models, prompts, options.minutes, options.seed)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "memory.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([item.name for item in fields(Sample)])
        writer.writerows(astuple(sample) for sample in samples)
    warm_up_s = 60 * options.minutes * options.warm_up
    warm = [sample for sample in samples if sample.seconds >= warm_up_s]
    times = [sample.seconds for sample in warm]
    rss, pool = (fit(times, [getattr(sample, name) for sample in warm]) for name in ("rss_mb", "pool_mb"))
    plot(samples, warm_up_s, rss, out / "memory.png")
    counts = [sample.tensors for sample in samples if sample.tensors >= 0]
    print(
        f"{len(samples)} prompts in {options.minutes:g} minutes; after the warm-up {len(warm)}: resident memory "
        f"{rss.mb_per_hour:+.2f} ± {2 * rss.error:.2f} MB/hour "
        f"(from {warm[0].rss_mb:.0f} to {warm[-1].rss_mb:.0f} MB), "
        f"KV pools {pool.mb_per_hour:+.2f} MB/hour ({warm[-1].pool_mb:.1f} MB), tensors {counts[0]} -> {counts[-1]}; "
        f"bound {options.bound:g} MB/hour"
    )
    return int(rss.mb_per_hour - 2 * rss.error > options.bound)


if __name__ == "__main__":
    sys.exit(main())
