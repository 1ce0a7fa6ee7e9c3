"""``python -m tests.fuzz``: the long run. Each surface in a process of its own, so that a crash of C code is seen."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .judge import HANG_S, fuzz
from .surfaces import SURFACES

_CHUNK = 500
"""Inputs in one process."""


def run() -> int:
    """Fuzz all surfaces; 1 if any input ended badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs in all, the same number for each surface")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--surface", choices=list(SURFACES), help="this one alone")
    parser.add_argument("--first", type=int, help="(inside a process) number of the first input, with --surface")
    options = parser.parse_args()
    if options.first is not None:
        with tempfile.TemporaryDirectory() as work:
            tally = fuzz(options.surface, options.first, options.count, options.seed, Path(work))
        print("\n" + json.dumps(vars(tally)))
        return 0
    names = [options.surface] if options.surface else list(SURFACES)
    total: Counter[str] = Counter()
    for name in names:
        counts, slowest, bad = _surface(name, options.count // len(names), options.seed)
        print(f"{name}: {sum(counts.values())} inputs, {dict(counts)}, slowest {slowest:.1f} s", flush=True)
        for story in bad:
            print(story, flush=True)
        total += counts
    print(
        f"in all: {sum(total.values())} inputs, {total['accepted']} accepted, {total['refused']} refused, "
        f"{total['traceback']} tracebacks, {total['hang']} hangs over {HANG_S:.0f} s, {total['execution']} executions, "
        f"{total['crash']} crashes"
    )
    return int(sum(total.values()) != total["accepted"] + total["refused"])


def _surface(name: str, count: int, seed: int) -> tuple[Counter[str], float, list[str]]:
    counts: Counter[str] = Counter()
    slowest, bad = 0.0, []
    for first in range(0, count, _CHUNK):
        options = ["--first", str(first), "--count", str(min(_CHUNK, count - first)), "--seed", str(seed)]
        command = [sys.executable, "-m", "tests.fuzz", "--surface", name, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            counts["crash"] += 1
            bad.append(f"{name}, inputs from {first}: exit code {done.returncode}: {done.stderr[-2000:]}")
            continue
        tally: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        counts.update(tally["counts"])
        slowest = max(slowest, tally["slowest_s"])
        bad += tally["bad"]
    return counts, slowest, bad


if __name__ == "__main__":
    sys.exit(run())
