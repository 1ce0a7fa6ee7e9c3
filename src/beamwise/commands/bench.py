"""``beamwise bench``: ways to decode, side by side on real prompts; ``beamwise bench compare``: two such runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beamwise.decoding.config import DecodeConfig
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.prompts import read_prompts

from .loading import ASSETS, Models, chosen_controller, load_models, silence_libraries

if TYPE_CHECKING:
    from beamwise.benchmarks.html import Block
    from beamwise.benchmarks.metrics import Row
    from beamwise.benchmarks.runner import BenchPrompt, Plan
    from beamwise.benchmarks.settings import Setting

_PASSING = ("out", "data", "prompts", "limit", "devices", "baseline", "traces", "view", "wandb")
"""Options that may differ when a run is continued; of the prompts their contents are compared instead."""


@dataclass
class BenchOptions:
    """Measure ways to decode side by side, in one process: prompt by prompt all methods, in rotating order.

    Writes results.parquet (a row per prompt, method and setting), summary.json, report.md with plots, and report.html,
    one file that needs no network. A run that was cut off continues where it stopped when it is started again.
    'beamwise bench compare A B' compares two folders.

    Attributes:
        prompts: JSONL files of prompts, inside --data. FILE@20 takes the first 20 of a file, FILE@2/category the first
            2 of each category. Without any, six short ones that come with Beamwise.
        data: Folder that relative names of prompts files start from.
        limit: At most so many prompts of each file; 0 takes all that were named.
        out: Folder of the results.
        num_beams: Beams, one after the other.
        sampling: Decode greedily, by sampling, or both.
        dtypes: Of the weights and the forward pass, one after the other.
        devices: auto, cpu, cuda, ..., one after the other.
        methods: transformers (its own search), assisted (its assisted generation, one beam), target_only, fixed, paper
            (the paper's rule, dynamic widths), rejection (the same with the paper's verification), learned (the
            controller, exact), dynamic (the controller, dynamic widths), oracle (hindsight; slow to prepare).
        shapes: GAMMAxM of fixed, paper and rejection: layers and candidates drafted; GAMMAxauto takes beams + 4.
        baseline: The method, as the tables name it, that speed is compared with.
        max_new_tokens: Longest continuation, in tokens.
        temperature: When sampling. Without it the model's generation_config decides.
        top_k: When sampling; 0 is all tokens. Without it as in `beamwise generate`.
        seed: Of everything drawn.
        target: Target model: a name, folder or Hugging Face id.
        draft: Draft model: a folder, a Hugging Face id, none, or default.
        drafter: What proposes tokens to the methods that speculate, as in `beamwise generate`.
        controller: Folder or Hub id of a controller, none, or default (the one shipped for the target and its draft).
        threshold: The paper's t.
        min_width: Fewest beams at a layer where widths are dynamic.
        quality: The controller's price of narrow layers, 0 to 1.
        lookup_tokens: Tokens that transformers' assisted generation looks up at once.
        view: So many of the first prompts have their forests drawn at the end of the report.
        traces: Folders from `beamwise collect`, to show in the HTML report what `beamwise simulate` predicts from them.
        wandb: Record summary, table and plots in wandb (as WANDB_MODE says; without it online for who is logged in,
            else offline).
    """

    prompts: list[str] = field(default_factory=list)
    data: str = "."
    limit: int = 0
    out: str = "runs/bench"
    num_beams: list[int] = field(default_factory=lambda: [1, 4])
    sampling: Literal["both", "greedy", "sample"] = "both"
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = field(default_factory=lambda: ["bfloat16"])
    devices: list[str] = field(default_factory=lambda: ["auto"])
    methods: list[str] = field(
        default_factory=lambda: ["transformers", "assisted", "target_only", "fixed", "paper", "learned", "dynamic"]
    )
    shapes: list[str] = field(default_factory=lambda: ["1xauto"])
    baseline: str = "transformers"
    max_new_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    seed: int = 0
    target: str = "smollm2-135m"
    draft: str = "default"
    drafter: Literal["auto", "model", "lookup", "union"] = "auto"
    controller: str = "default"
    threshold: float = 0.7
    min_width: int = 1
    quality: float = 0.5
    lookup_tokens: int = 4
    view: int = 1
    traces: list[str] = field(default_factory=list)
    wandb: bool = False

    def __post_init__(self) -> None:
        for name in ("num_beams", "dtypes", "devices"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {values}: give at least one value, each once")
        for num_beams in self.num_beams:
            DecodeConfig(num_beams=num_beams, max_new_tokens=self.max_new_tokens)  # validates
        for name in ("limit", "seed", "view"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} is {getattr(self, name)}: it must be at least 0")
        for name in ("min_width", "lookup_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        if not 0.0 < self.threshold < 1.0 or not 0.0 <= self.quality <= 1.0:
            raise ConfigError("--threshold must lie strictly between 0 and 1, --quality between 0 and 1")
        if self.temperature is not None and self.temperature <= 0.0:
            raise ConfigError(f"--temperature is {self.temperature}: it must be above 0")


def bench(options: BenchOptions) -> Path:
    """Measure, judge and report.

    Returns:
        The report for people.

    Raises:
        BeamwiseError: bad input, or another run's folder.
    """
    from beamwise.benchmarks.forest_files import draw_forests
    from beamwise.benchmarks.report import FORESTS, write_report
    from beamwise.benchmarks.runner import judge, open_folder, run_plan

    prompts = select_prompts(options)
    plan = make_plan(options, prompts)
    folder = Path(options.out)
    asked = describe(options, prompts)
    predicted = _predict(options)
    open_folder(folder, asked)
    silence_libraries()

    def load(dtype: str, device: str) -> Models:
        return load_models(options.target, options.draft, options.drafter, dtype, device)

    with _progress(plan) as on_progress:
        parts = run_plan(plan, folder, load, on_progress)
    rows = judge(parts, prompts, load, plan.settings[0].device)
    draw_forests(plan, folder / FORESTS, load, options.view)
    report = write_report(folder, plan, parts, rows, asked, options.baseline, predicted(rows))
    if options.wandb:
        from beamwise.train.tracking import log_summary

        log_summary(
            "bench", asked, report.headline, report.plots, save_dir=str(folder), tables={"results": report.table}
        )
    return report.html


def _predict(options: BenchOptions) -> Callable[[Sequence[Row]], Sequence[Block]]:
    """Makes the report's section on what traces predicted, if any were given."""
    if not options.traces:
        return lambda rows: ()
    from beamwise.benchmarks.simulate_check import predict_section
    from beamwise.controller.checkpoint import Controller

    where = chosen_controller(options.controller, options.target, options.draft)
    if where is None:
        raise ConfigError("--traces needs a controller to predict with: give --controller, or leave --traces out")
    return predict_section(options.traces, Controller.from_pretrained(where))


def select_prompts(options: BenchOptions) -> list[BenchPrompt]:
    """Read the prompts that were asked for.

    Raises:
        ConfigError: a malformed choice, or the same prompt twice.
        InputError: a bad file.
    """
    from beamwise.benchmarks.runner import BenchPrompt

    chosen = []
    for text in options.prompts or [str(ASSETS / "demo_prompts.jsonl")]:
        name, _, choice = text.partition("@")
        count, _, each = choice.partition("/")
        if (choice and not (count.isdigit() and int(count))) or each not in ("", "category"):
            raise ConfigError(f"--prompts '{text}': write FILE, FILE@20 or FILE@2/category")
        path, taken, seen = Path(options.data) / name, 0, dict[Any, int]()
        for prompt in read_prompts(path):
            kind = prompt.record.get("category") if each else None
            seen[kind] = seen.get(kind, 0) + 1
            if (not count or seen[kind] <= int(count)) and (not options.limit or taken < options.limit):
                chosen.append(BenchPrompt(prompt, path.stem))
                taken += 1
    if len({prompt.key for prompt in chosen}) < len(chosen):
        raise ConfigError("--prompts: two prompts of one file have the same id, or a file was named twice")
    return chosen


def make_plan(options: BenchOptions, prompts: Sequence[BenchPrompt]) -> Plan:
    """The grid.

    Raises:
        ConfigError: an unknown method, shape, or baseline.
        ModelError: a device that does not exist.
    """
    from beamwise.benchmarks.methods import make_methods
    from beamwise.benchmarks.runner import Plan
    from beamwise.benchmarks.settings import MethodOptions, Setting
    from beamwise.decoding.models import resolve_device

    methods = make_methods(options.methods, options.shapes)
    if options.baseline not in [method.name for method in methods]:
        names = [method.name for method in methods]
        raise ConfigError(f"--baseline '{options.baseline}' is none of the methods {names}: take one of these")
    kinds = {"both": (False, True), "greedy": (False,), "sample": (True,)}[options.sampling]
    settings = [
        Setting(num_beams, do_sample, dtype, str(resolve_device(device)))
        for device in options.devices
        for dtype in options.dtypes
        for num_beams in options.num_beams
        for do_sample in kinds
    ]
    shared = MethodOptions(
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        drafter=options.drafter,
        controller=chosen_controller(options.controller, options.target, options.draft),
        threshold=options.threshold,
        min_width=options.min_width,
        quality=options.quality,
        temperature=options.temperature,
        top_k=options.top_k,
        lookup_tokens=options.lookup_tokens,
    )
    return Plan(settings, methods, prompts, shared)


def describe(options: BenchOptions, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """What two runs must share to be one, as JSON values: options, contents of the prompts, machine, versions."""
    import torch

    digest = hashlib.sha256()
    for one in prompts:
        digest.update(json.dumps([one.source, one.prompt.id, one.prompt.record], sort_keys=True).encode() + b"\n")
    machine = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    asked = {name: value for name, value in asdict(options).items() if name not in _PASSING}
    return {
        **asked,
        "prompts": {"sha256": digest.hexdigest(), "count": len(prompts)},
        "machine": machine,
        "versions": {name: version(name) for name in ("beamwise", "torch", "transformers")},
    }


@contextmanager
def _progress(plan: Plan) -> Iterator[Any]:
    """A bar on stderr for each setting."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(plan.prompts))

        def advance(setting: Setting, done: int, positions: int) -> None:
            place = f"{plan.settings.index(setting) + 1} of {len(plan.settings)}"
            progress.update(task, completed=done, description=f"{setting.name} ({place}), prompts")

        yield advance


def compare_main(arguments: list[str]) -> None:
    """``beamwise bench compare A B``: print a table of paired ratios.

    Raises:
        BeamwiseError: folders that are no benchmarks, or do not match.
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="beamwise bench compare",
        description="Compare two folders of `beamwise bench`: prompts per second, prompt by prompt, B over A.",
        exit_on_error=False,
    )
    parser.add_argument("first", metavar="A", type=str, help="folder of a benchmark")
    parser.add_argument("second", metavar="B", type=str, help="another one, of the same prompts")
    chosen = parser.parse_args(arguments)
    from beamwise.benchmarks.compare import compare

    print(compare(chosen.first, chosen.second), end="")
