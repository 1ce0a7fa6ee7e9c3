"""``beamwise demo``: learn a controller, then decode real prompts by transformers' beam search and by Beamwise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console
from rich.table import Table

from beamwise.decoding.config import DecodeConfig
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.prompts import encode_prompt, read_prompts

from .loading import ASSETS, Models, load_models, silence_libraries

if TYPE_CHECKING:
    import torch

    from beamwise.controller.checkpoint import Controller
    from beamwise.decoding.generate import SpeculativeBeams
    from beamwise.decoding.prompts import Prompt

TRANSFORMERS = "transformers"
ALONE = "no drafts"
FIXED = "fixed"
PAPER = "paper"
LEARNED = "learned"


@dataclass
class DemoOptions:
    """Learn a width controller on a few real prompts, then decode others with transformers and Beamwise, and compare.

    First the whole loop at a small size: log traces, measure this device, train, export. Then each prompt is decoded
    several times in a row, in an order that rotates: by transformers' own beam search, by Beamwise without a draft,
    with a draft and fixed widths, by the paper's rule (which keeps fewer beams where the draft is likely to fail, so
    its texts may differ), and with the controller just learnt. Prints the texts, then medians over the prompts.

    Attributes:
        prompts: JSONL file of prompts. Without it, six short ones that come with Beamwise.
        num_beams: Beams.
        max_new_tokens: Longest continuation, in tokens.
        target: Target model: smollm2-135m (installed with Beamwise), a folder, or a Hugging Face id.
        draft: Draft model: a folder, a Hugging Face id, none, or default (the one shipped for the target, where there
            is one).
        drafter: What proposes tokens: model, lookup, union, or auto (union where there is a draft, else lookup).
        gamma: Layers drafted in one block with fixed widths, and by the paper's rule.
        draft_width: Candidates drafted at each layer by these. Without it, --num-beams + 4.
        learn: Learn a controller first.
        learn_prompts: Training prompts to log traces on, at most 48.
        out: Folder of the traces, the profile, the controller and its plots.
        dtype: Of the weights and the forward pass.
        device: auto, cpu, cuda, ...
    """

    prompts: str | None = None
    num_beams: int = 2
    max_new_tokens: int = 64
    target: str = "smollm2-135m"
    draft: str = "default"
    drafter: Literal["auto", "model", "lookup", "union"] = "auto"
    gamma: int = 1
    draft_width: int | None = None
    learn: bool = True
    learn_prompts: int = 48
    out: str = "runs/demo"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"

    def __post_init__(self) -> None:
        DecodeConfig(num_beams=self.num_beams, max_new_tokens=self.max_new_tokens)  # validates
        if self.learn and not 8 <= self.learn_prompts <= 48:
            raise ConfigError(f"learn_prompts is {self.learn_prompts}: between 8 and 48 prompts can be learnt from")


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one method.

    Attributes:
        tokens: int64 (T,), the new tokens, EOS included.
        seconds: wall clock of the whole call of ``generate``.
        forwards: forwards of the target.
        acceptance: layers advanced per forward.
        log_likelihood: mean per new token under the target, from one plain forward.
    """

    tokens: torch.Tensor
    seconds: float
    forwards: int
    acceptance: float
    log_likelihood: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the returned text per second."""
        return self.tokens.shape[0] / self.seconds


Method = Callable[[list[int]], Run]


def demo(options: DemoOptions) -> None:
    """Decode the prompts with each method, and print texts and a table.

    Raises:
        BeamwiseError: bad input.
    """
    console = Console(highlight=False)
    prompts = read_prompts(options.prompts or ASSETS / "demo_prompts.jsonl")
    silence_libraries()
    models = load_models(options.target, options.draft, options.drafter, options.dtype, options.device)
    from .decode import check_lengths

    tokens = [encode_prompt(models.tokenizer, prompt.text) for prompt in prompts]
    check_lengths(models, prompts, tokens, options.max_new_tokens)
    methods = _methods(models, options, _learn(models, options, console) if options.learn else None)
    for method in methods.values():  # once apart from the measured runs: buffers, kernels, checks of the model
        method(tokens[0])
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for number, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        names = list(methods)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(methods[name](ids))
        _print_text(console, models, prompt, runs[list(methods)[-1]][-1])
    _print_table(console, runs, options, _describe_drafter(models, options))


def _learn(models: Models, options: DemoOptions, console: Console) -> Controller:
    from .loop import learn_controller

    return learn_controller(
        models,
        Path(options.out),
        console,
        target=options.target,
        drafter=options.drafter,
        num_beams=options.num_beams,
        prompts=options.learn_prompts,
    )


def _methods(models: Models, options: DemoOptions, controller: Controller | None) -> dict[str, Method]:
    from beamwise.api import SpeculativeBeams

    arguments = {"num_beams": options.num_beams, "max_new_tokens": options.max_new_tokens, "do_sample": False}
    alone = SpeculativeBeams(drafter="none", batch_size=1)
    fixed = SpeculativeBeams(
        models.draft, options.drafter, gamma=options.gamma, draft_width=options.draft_width, batch_size=1
    )
    paper = SpeculativeBeams(
        models.draft,
        options.drafter,
        gamma=options.gamma,
        draft_width=options.draft_width,
        batch_size=1,
        width_mode="dynamic",
    )
    methods: dict[str, Method] = {
        TRANSFORMERS: lambda ids: _decode(models, ids, arguments, None),
        ALONE: lambda ids: _decode(models, ids, arguments, alone),
        FIXED: lambda ids: _decode(models, ids, arguments, fixed),
        PAPER: lambda ids: _decode(models, ids, arguments, paper),
    }
    if controller is not None:
        learned = SpeculativeBeams(models.draft, options.drafter, controller, batch_size=1)
        methods[LEARNED] = lambda ids: _decode(models, ids, arguments, learned)
    return methods


def _decode(models: Models, ids: list[int], arguments: dict[str, Any], beams: SpeculativeBeams | None) -> Run:
    """One timed call of ``generate``: transformers' own where ``beams`` is None. Forwards are counted."""
    from beamwise.benchmarks.answers import mean_log_likelihood

    from .decode import cut_at_eos, pad_left

    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    inputs = pad_left([ids], models.target.device)
    chosen = {} if beams is None else {"custom_generate": beams}
    generate = cast(Any, models.target).generate
    hook = cast("torch.nn.Module", models.target).register_forward_hook(count)
    try:
        start = time.perf_counter()
        output = generate(**inputs, **arguments, **chosen, return_dict_in_generate=True)
        sequence = output.sequences[0].cpu()  # waits for the device
        seconds = time.perf_counter() - start
    finally:
        hook.remove()
    new_tokens = cut_at_eos(sequence[len(ids) :], models)
    return Run(
        tokens=new_tokens,
        seconds=seconds,
        forwards=forwards if beams is None else beams.stats.target_forwards,
        acceptance=1.0 if beams is None else beams.stats.mean_acceptance_length,
        log_likelihood=mean_log_likelihood(models.target, ids, new_tokens.tolist()),
    )


def _describe_drafter(models: Models, options: DemoOptions) -> str:
    kind = options.drafter
    if kind == "auto":
        kind = "lookup" if models.draft is None else "union"
    return {"model": "draft model", "lookup": "n-gram lookup", "union": "draft model and n-gram lookup"}[kind]


def _print_text(console: Console, models: Models, prompt: Prompt, run: Run) -> None:
    console.print(f"[bold]{prompt.id}[/bold]", end="  ")
    console.print(prompt.text, markup=False, style="dim")
    console.print(str(models.tokenizer.decode(run.tokens, skip_special_tokens=True)).strip(), markup=False)
    console.print()


def _print_table(console: Console, runs: dict[str, list[Run]], options: DemoOptions, drafter: str) -> None:
    baseline = runs[TRANSFORMERS]
    count = len(baseline)
    table = Table(
        title=f"{options.target}, {options.num_beams} beams, {options.dtype}, {count} prompts: medians",
        caption=f"Drafts: {drafter}. fixed: {options.gamma} layer(s) of fixed width; paper: as many, the paper's rule "
        "says how many beams stay.",
    )
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")

    def add_row(title: str, measure: Callable[[Run, Run], float], digits: int) -> None:
        medians = [
            statistics.median(measure(run, base) for run, base in zip(measured, baseline, strict=True))
            for measured in runs.values()
        ]
        table.add_row(title, *(f"{median:.{digits}f}" for median in medians))

    add_row("tokens/s", lambda run, _: run.tokens_per_second, 1)
    add_row("speed-up", lambda run, base: run.tokens_per_second / base.tokens_per_second, 2)
    add_row("forwards/token", lambda run, _: run.forwards / run.tokens.shape[0], 2)
    add_row("acceptance length", lambda run, _: run.acceptance, 2)
    add_row("log-likelihood", lambda run, _: run.log_likelihood, 3)
    equal = {name: sum(map(_equal, measured, baseline)) for name, measured in runs.items()}
    table.add_row("equal outputs", *(f"{number} of {count}" for number in equal.values()))
    console.print(table)
    if any(number < count for name, number in equal.items() if name != PAPER) and options.dtype != "float32":
        console.print(
            f"{options.dtype} rounds differently in forwards of different shapes, so beams that nearly tie can change "
            "places. With --dtype float32 outputs are equal token for token, exact ties apart.",
            markup=False,
        )


def _equal(one: Run, other: Run) -> bool:
    return one.tokens.tolist() == other.tokens.tolist()
