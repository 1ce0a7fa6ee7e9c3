"""Kills a collecting run at random moments, resumes it each time, and compares the dataset with an uninterrupted one.

``python -m tests.fuzz.kills --kills 50``. The runs are forked from one process that has imported everything, so that a
kill falls into loading, decoding or writing, and not into a second of imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before anything starts threads, which a fork would lose

from beamwise.cli import main  # noqa: E402
from beamwise.commands import collect, collector, decode  # noqa: E402, F401  imported here, not once in every child
from beamwise.commands.loading import load_models  # noqa: E402
from beamwise.decoding.trace import check_traces, read_blocks, read_layers  # noqa: E402
from tests.conftest import make_tiny_llama  # noqa: E402
from tests.tiny_folder import WORDS, save_tiny_folder  # noqa: E402

TIMES = ("draft_s", "target_s", "other_s")


def collect_arguments(folder: Path, prompts: int = 24) -> list[str]:
    """Make a tiny model and prompts in a folder; the arguments of a collecting run over them, all but ``--out``."""
    target = save_tiny_folder(folder / "target", make_tiny_llama(0, vocab_size=40, scale=0.5))
    lines = [
        json.dumps({"id": f"p{n}", "prompt": f"{WORDS[n % 13]} {WORDS[n % 5]} {WORDS[n % 13]}"}) for n in range(prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    options = {"prompts": str(folder / "prompts.jsonl"), "target": target, "drafter": "lookup", "device": "cpu"}
    options |= {"max-new-tokens": "12", "gamma": "3", "draft-widths": "[2,6]", "dtype": "float32", "num-beams": "[1,3]"}
    flat = [text for name, value in options.items() for text in (f"--{name}", value)]
    return ["collect", *flat, "--prompts-per-shard", "2"]


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of a trace folder in order, without the times."""
    check_traces(folder)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, read in (("layers", read_layers), ("blocks", read_blocks)):
        found = [row for batch in read(folder) for row in batch.to_pylist()]
        tables[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in found]
    return tables


def run_forked(arguments: list[str], kill_after_s: float | None) -> int:
    """Run the command line in a forked child; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            code = main(arguments)
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_and_resume(work: Path, kills: int, seed: int) -> Counter[str]:
    """Kill and resume until ``kills`` kills have hit a running process.

    Returns:
        Counts: kills, kills that left a half-written file, datasets, rows of one dataset, datasets that differ.
    """
    rng, counts = random.Random(seed), Counter[str]()
    arguments = collect_arguments(work)
    load_models(arguments[arguments.index("--target") + 1], "default", "lookup", "float32", "cpu")  # warms up
    start = time.perf_counter()
    assert run_forked([*arguments, "--out", str(work / "whole")], None) == 0
    whole_s = time.perf_counter() - start
    whole = rows(work / "whole")
    counts["rows"] = sum(map(len, whole.values()))
    while counts["kills"] < kills:
        out = work / "killed"
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            code = run_forked([*arguments, "--out", str(out)], rng.uniform(0.0, whole_s))
            if code == -signal.SIGKILL:
                counts["kills"] += 1
                counts["half written"] += bool(list(out.rglob(".*.writing")))
            if counts["kills"] == kills:
                break
        if code == -signal.SIGKILL:
            code = run_forked([*arguments, "--out", str(out)], None)
        assert code == 0, f"the command ended with {code}"
        counts["datasets"] += 1
        counts["different"] += rows(out) != whole
        shutil.rmtree(out)
    return counts


def run() -> int:
    """The command; 1 if a dataset differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        counts = kill_and_resume(Path(work), options.kills, options.seed)
    print(
        f"{counts['kills']} kills ({counts['half written']} left a half-written file) in {counts['datasets']} datasets "
        f"of {counts['rows']} rows: {counts['different']} differ from an uninterrupted run"
    )
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(run())
