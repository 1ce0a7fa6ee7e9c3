"""One masked attention call against trunk and tree apart: which is faster here, by trunk length.

    python -m beamwise.benchmarks.attention [--device cuda --dtype bfloat16]

Prints a Markdown table of milliseconds per layer, the median of repeated calls in turns. The threshold of
`beamwise.decoding.attention` should lie where the second column becomes the smaller one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from beamwise.decoding.attention import grouped_attention, grouped_mask


def measure(
    calls: dict[str, Callable[[], object]], repeats: int, synchronise: Callable[[], object]
) -> dict[str, float]:
    """Median milliseconds of each call; they take turns, so that a busy machine is busy for all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            synchronise()
            start = time.perf_counter()
            call()
            synchronise()
            if repeat >= 2:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


@torch.inference_mode()
def compare(trunk: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of one layer's attention with a trunk of so many slots, masked and split."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    make = partial(torch.randn, device=device, dtype=dtype)
    nodes, heads, kv_heads, dim = options.nodes, options.heads, options.kv_heads, options.head_dim
    slots = -(-(trunk + nodes + 1) // 8) * 8
    query = make(1, heads, nodes, dim)
    key, value = make(1, kv_heads, slots, dim), make(1, kv_heads, slots, dim)
    visible = torch.ones(1, 1, nodes, slots, dtype=torch.bool, device=device)
    visible[..., trunk:] = torch.eye(nodes, slots - trunk, dtype=torch.bool, device=device)
    mask = grouped_mask(visible, heads // kv_heads, dtype)
    part = mask[..., trunk:].contiguous()
    module: Any = None
    return measure(
        {
            "masked": lambda: grouped_attention(module, query, key, value, mask),
            "split": lambda: grouped_attention(module, query, key, value, part),
        },
        options.repeats,
        torch.cuda.synchronize if device.type == "cuda" else lambda: None,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--nodes", type=int, default=24, help="nodes of the forest")
    parser.add_argument("--heads", type=int, default=9, help="query heads; the defaults are SmolLM2-135M's")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--trunks", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print("| trunk | masked, ms | split, ms |\n|---|---|---|")
    for trunk in options.trunks:
        ms = compare(trunk, options)
        print(f"| {trunk} | {ms['masked']:.3f} | {ms['split']:.3f} |")


if __name__ == "__main__":
    main()
