"""``beamwise generate``: decode a prompt or a file of prompts."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from beamwise.decoding.config import DecodeConfig
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.prompts import Prompt, check_text, encode_prompt, read_prompts

from .controllers import choose_controller
from .journal import finish_output, open_journal
from .loading import load_models, silence_libraries
from .output import check_writable, open_output
from .stopping import StopRequests

if TYPE_CHECKING:
    from .decode import Decoded, OnProgress

_RESUMABLE = ("prompts", "out", "seed", "batch_size", "device", "runner")
"""Options that may differ when a run is continued (the prompts are known by their file's hash); its seed stays."""


@dataclass
class GenerateOptions:
    """Decode a prompt, or a JSONL file of prompts, with speculative beams.

    The output is that of transformers' generate with the same arguments, only sooner; the options of the drafter change
    nothing but the speed. A single prompt prints its text on stdout; a file gives JSONL with id, prompt, text, texts,
    scores and stats, besides what its lines had. What generate takes from the model's generation_config by itself is
    taken here too.

    Attributes:
        prompt: One prompt.
        prompts: JSONL file of prompts, one object a line with 'prompt' and optionally 'id', 'category', ...
        out: JSONL file to write, at once and only when all is decoded; until then lines gather in OUT.partial, from
            which the same command continues. Without it a prompt's text, or the JSONL of a file, goes to stdout.
        num_beams: Beams; 1 is plain greedy decoding or sampling.
        max_new_tokens: Longest continuation, in tokens.
        do_sample: Draw beams instead of taking the best ones.
        temperature: With --do-sample; below 1 is bolder. Without it the model's generation_config decides, else 1.
        top_k: With --do-sample, draw from the k likeliest tokens; 0 is all of them. Without it the model's
            generation_config decides, and where that is silent generate uses 50.
        top_p: With --do-sample, draw from the likeliest tokens that make up this probability. Without it the model's
            generation_config decides, else 1 (all of them).
        seed: With --do-sample; the same seed gives the same text whatever drafts. Without it a random one is drawn,
            and the JSONL names it.
        length_penalty: Exponent of the length that divides a finished beam's score; above 0 favours longer texts.
        early_stopping: true, false or never: when a search with enough finished beams ends, as in generate.
        num_return_sequences: Texts per prompt, best first; at most --num-beams.
        repetition_penalty: Above 1 makes tokens that were already used less likely.
        no_repeat_ngram_size: No n-gram of this many tokens occurs twice; 0 allows all.
        target: Target model: smollm2-135m (installed with Beamwise), a folder, or a Hugging Face id.
        draft: Draft model: a folder from `beamwise distil`, a folder or Hugging Face id of a small model with the
            target's vocabulary, none, or default (the one shipped for the target, where there is one).
        drafter: What proposes tokens: model (the draft), lookup (n-grams of prompt and output), union (both), none
            (target alone), or auto (union where there is a draft, else lookup).
        controller: What decides how deep and how wide to draft: the folder or Hub id of a width controller, none
            (--gamma and --draft-width), or default (the one shipped for the target and its draft, where both are used
            and neither --gamma nor --draft-width is given).
        gamma: Layers drafted in one block, without a controller. [default: 4]
        draft_width: Candidates drafted at each layer, without a controller. [default: --num-beams + 4]
        verification: coupled (the output of generate, whatever drafts) or rejection (the paper's: beams are draws from
            the target's joint distribution; needs --do-sample).
        law: With --verification rejection, beams of a layer are distinct, or independent (replacement, the paper's).
        warping: With --verification rejection, temperature, top_k and top_p act per_beam, or on the joint distribution
            over beam and token (the paper's).
        width_mode: exact, or dynamic: keep fewer beams where the draft is likely to fail (the paper's idea), which
            changes the output for speed.
        min_width: With --width-mode dynamic, the fewest beams drawn at a layer. [default: 1]
        threshold: With --width-mode dynamic and no controller, keep as many beams as are accepted with this
            probability (the paper's rule). [default: 0.7]
        quality: With --width-mode dynamic and a controller, its price of narrow layers: 0 is all for speed, 1 nearly
            always keeps all beams. [default: 0.5]
        carry_beams: With --width-mode dynamic, beams handed from block to block, the likeliest; 1 is the paper's
            variant for little memory. [default: all]
        dtype: Of the weights and the forward pass; scores are float32 whatever it is.
        device: auto, cpu, cuda, ...
        runner: How the models are run: eager, buckets (padded to static shapes), graphs (these as CUDA graphs), compile
            (these by torch.compile), or auto (graphs on CUDA, else eager). The output is the same but for rounding.
        batch_size: Prompts of a file decoded at once; as one ends, the next one takes its place.
        chat_template: Pass prompts through the tokenizer's chat template, where it has one.
        view: With --prompt, an SVG file to write: the forest of every block, what was accepted and what was not.
    """

    prompt: str | None = None
    prompts: str | None = None
    out: str | None = None
    num_beams: int = 4
    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    target: str = "smollm2-135m"
    draft: str = "default"
    drafter: Literal["auto", "model", "lookup", "union", "none"] = "auto"
    controller: str = "default"
    gamma: int | None = None
    draft_width: int | None = None
    verification: Literal["coupled", "rejection"] = "coupled"
    law: Literal["distinct", "replacement"] = "distinct"
    warping: Literal["per_beam", "joint"] = "per_beam"
    width_mode: Literal["exact", "dynamic"] = "exact"
    min_width: int | None = None
    threshold: float | None = None
    quality: float | None = None
    carry_beams: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    runner: Literal["auto", "eager", "buckets", "graphs", "compile"] = "auto"
    batch_size: int = 8
    chat_template: bool = True
    view: str | None = None

    def __post_init__(self) -> None:
        DecodeConfig(  # validates
            num_beams=self.num_beams,
            max_new_tokens=self.max_new_tokens,
            do_sample=self.do_sample,
            num_return_sequences=self.num_return_sequences,
            early_stopping=self.early_stopping,
            **self.variant(),
        )
        if (self.prompt is None) == (self.prompts is None):
            raise ConfigError("give either --prompt TEXT or --prompts FILE.jsonl")
        if self.view is not None and self.prompt is None:
            raise ConfigError("--view draws the forests of one prompt: give it with --prompt TEXT")
        for name in ("temperature", "top_k", "top_p", "seed"):
            if getattr(self, name) is not None and not self.do_sample:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} has an effect only on sampling: add --do-sample, or leave it out")
        for name in ("min_width", "threshold", "quality"):
            if getattr(self, name) is not None and self.width_mode == "exact":
                raise ConfigError(f"--{name.replace('_', '-')} has an effect only on --width-mode dynamic: add that")
        for name, value, lowest, highest in (
            ("temperature", self.temperature, 1e-4, math.inf),
            ("top-k", self.top_k, 0, math.inf),
            ("top-p", self.top_p, 1e-6, 1),
            ("seed", self.seed, 0, 2**63 - 1),
            ("repetition-penalty", self.repetition_penalty, 1e-4, math.inf),
            ("no-repeat-ngram-size", self.no_repeat_ngram_size, 0, math.inf),
        ):
            if value is not None and not lowest <= value <= highest:
                bounds = f"at least {lowest}" if highest == math.inf else f"between {lowest} and {highest}"
                raise ConfigError(f"--{name} is {value}: it must be {bounds}")

    def variant(self) -> dict[str, Any]:
        """What is verified and how, as `DecodeConfig` takes it."""
        names = ("verification", "law", "warping", "width_mode", "carry_beams", "runner")
        variant = {name: getattr(self, name) for name in names}
        return {**variant, "min_width": 1 if self.min_width is None else self.min_width}

    def generate_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``model.generate``; what was not given is left to the model's generation_config."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {
            "num_beams": self.num_beams,
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "num_return_sequences": self.num_return_sequences,
            "repetition_penalty": self.repetition_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            **{name: value for name, value in sampling.items() if value is not None},
        }


def generate(options: GenerateOptions) -> None:
    """Decode the prompts and write the results.

    Raises:
        BeamwiseError: bad input; nothing has been written then.
        Interrupted: by SIGINT or SIGTERM while decoding a file, after the prompts that were being decoded.
    """
    prompts = _gather_prompts(options)
    check_writable(options.out)
    check_writable(options.view, "--view")
    silence_libraries()
    models = load_models(options.target, options.draft, options.drafter, options.dtype, options.device)
    from beamwise.api import SpeculativeBeams
    from beamwise.benchmarks.forest import ForestLog
    from beamwise.benchmarks.forest_svg import draw_forest

    from .decode import Meter, check_lengths, decode_prompts

    tokens = [encode_prompt(models.tokenizer, prompt.text, options.chat_template) for prompt in prompts]
    check_lengths(models, prompts, tokens, options.max_new_tokens)
    seed = options.seed
    if seed is None and options.do_sample:
        seed = secrets.randbits(62)
    controller = choose_controller(options)
    settings = {name: value for name, value in asdict(options).items() if name not in _RESUMABLE}
    with (
        open_journal(options.prompts, options.out, settings, seed) as journal,
        StopRequests() if options.prompts is not None else nullcontext(StopRequests()) as stop,
        progress_bar(len(prompts), shown=options.prompts is not None) as on_progress,
    ):
        lines, seed = ([], seed) if journal is None else (journal.lines, journal.seed)
        first = len(lines)
        if on_progress is not None:
            on_progress(first, 0)
        meter = Meter(on_progress)
        log = ForestLog(lambda token: str(models.tokenizer.decode([token])))
        beams = SpeculativeBeams(
            draft_model=models.draft,
            drafter=options.drafter,
            controller=controller,
            gamma=4 if options.gamma is None else options.gamma,
            draft_width=options.draft_width,
            seed=seed,
            batch_size=options.batch_size,
            observer=meter if options.view is None else partial(_tell, meter, log),
            threshold=0.7 if options.threshold is None else options.threshold,
            quality=0.5 if options.quality is None else options.quality,
            **options.variant(),
        )
        wanted = takewhile(lambda _: stop.signum is None, tokens[first:])
        outcomes = decode_prompts(models, beams, meter, wanted, options.generate_arguments(), first)
        for prompt, outcome in zip(prompts[first:], outcomes, strict=False):  # fewer outcomes after a signal
            if options.view is not None:
                with open_output(options.view) as file:
                    file.write(draw_forest(log.blocks, prompt.text))
            if options.prompts is None and options.out is None:
                print("\n\n".join(outcome.texts))
                return
            (lines.append if journal is None else journal.add)(
                json.dumps(_record(prompt, outcome, seed), ensure_ascii=False)
            )
    finish_output(options.out, lines, len(prompts), stop.signum, journal)


def _tell(*to: Any) -> None:
    """Show a block (the last argument) to several observers."""
    for observer in to[:-1]:
        observer(to[-1])


def _gather_prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is not None:
        return read_prompts(options.prompts)
    text = check_text(options.prompt or "", "--prompt")
    return [Prompt("prompt", text, {"prompt": text}, "--prompt")]


def _record(prompt: Prompt, outcome: Decoded, seed: int | None) -> dict[str, Any]:
    """The prompt's line of output: what its line of input had, and what came of it."""
    stats = {
        "mean_acceptance_length": round(outcome.stats.mean_acceptance_length, 4),
        "target_forwards": outcome.stats.target_forwards,
        "tokens": outcome.sequences[0].shape[0],
        "seconds": round(outcome.seconds, 3),
    }
    drawn = {} if seed is None else {"seed": seed}
    results = {"text": outcome.texts[0], "texts": outcome.texts, "scores": outcome.scores, **drawn, "stats": stats}
    return {**prompt.record, "id": prompt.id, **results}


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[OnProgress | None]:
    """A bar on stderr: prompts done, and tokens decoded along each beam."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("decoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("decoding", total=total, tokens=0)

        def advance(prompts: int, layers: int) -> None:
            progress.update(task, advance=prompts, tokens=progress.tasks[task].fields["tokens"] + layers)

        yield advance
