"""`beamwise collect`: decode prompts with an exploring policy and log what every layer saw and did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beamwise.decoding.errors import ConfigError, InputError
from beamwise.decoding.prompts import read_prompts

from .collector import Decoded, Todo, process_executor
from .stopping import Interrupted, StopRequests

if TYPE_CHECKING:
    import pyarrow as pa

_ACTORS = ("executor", "address", "actors", "cpus_per_actor", "gpus_per_actor")
_RESUMABLE = ("out", "limit", "prompts_per_shard", "device", "wandb", *_ACTORS)
"""Options that may differ when a run is continued."""


@dataclass
class CollectOptions:
    """Decode prompts and log features and outcomes of every drafted layer, for training a controller.

    Widths, draft widths and depths are drawn at random, so that all outcomes are seen; what is decoded is the same as
    ever. A run that was cut off continues where it stopped when it is started again.

    Attributes:
        prompts: JSONL file of prompts.
        out: Folder of the traces.
        run: Name of the run, a key of every row.
        num_beams: Beams, taken in turn, prompt by prompt.
        sampling: Decode greedily, by sampling, or by turns.
        temperature: When sampling.
        top_k: When sampling; 0 is all tokens.
        verification: coupled, or rejection (the paper's; with --sampling sample): logs the paper's probabilities too.
        max_new_tokens: Longest continuation, in tokens.
        gamma: Most layers drafted in one block.
        draft_widths: Draft widths to draw from.
        limit: Prompts to decode, evenly spaced in the file; 0 takes all.
        seed: Of everything drawn at random.
        target: Target model: a name, folder or Hugging Face id.
        draft: Draft model: a folder, a Hugging Face id, none, or default.
        drafter: What proposes tokens, as in `beamwise generate`.
        dtype: Of the weights and the forward pass.
        device: auto, cpu, cuda, ...
        prompts_per_shard: Prompts committed together; a killed run loses at most these.
        wandb: Log progress to wandb (as WANDB_MODE says; without it online for who is logged in, else offline).
        executor: Decode in this process, or on actors of Ray; the traces are the same.
        address: Of a Ray cluster, as ray.init takes it; without one a local cluster is started.
        actors: With Ray; 0 is as many as the cluster has room for.
        cpus_per_actor: Processor cores of an actor.
        gpus_per_actor: GPUs of an actor; a fraction lets several share one.
    """

    prompts: str
    out: str
    run: str = "collect"
    num_beams: list[int] = field(default_factory=lambda: [1, 2, 4])
    sampling: Literal["both", "greedy", "sample"] = "both"
    temperature: float = 1.0
    top_k: int = 50
    verification: Literal["coupled", "rejection"] = "coupled"
    max_new_tokens: int = 96
    gamma: int = 5
    draft_widths: list[int] = field(default_factory=lambda: [4, 8, 16, 24, 32])
    limit: int = 0
    seed: int = 0
    target: str = "smollm2-135m"
    draft: str = "default"
    drafter: Literal["auto", "model", "lookup", "union"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    prompts_per_shard: int = 8
    wandb: bool = False
    executor: Literal["process", "ray"] = "process"
    address: str = ""
    actors: int = 0
    cpus_per_actor: float = 1.0
    gpus_per_actor: float = 0.0

    def __post_init__(self) -> None:
        if not self.num_beams or min(self.num_beams) < 1:
            raise ConfigError(f"num_beams is {self.num_beams}: give at least one number, each at least 1")
        if self.max_new_tokens < 2 or self.limit < 0:
            raise ConfigError("max_new_tokens must be at least 2 and limit at least 0")
        if self.verification == "rejection" and self.sampling != "sample":
            raise ConfigError("--verification rejection accepts random draws: add --sampling sample")
        if self.temperature <= 0.0:
            raise ConfigError(
                f"temperature is {self.temperature}: it must be above 0 (--sampling greedy draws nothing)"
            )
        if self.actors < 0 or self.cpus_per_actor <= 0.0 or self.gpus_per_actor < 0.0:
            raise ConfigError("actors and gpus_per_actor must be at least 0, cpus_per_actor above 0")


def collect(options: CollectOptions) -> Path:
    """Run the command.

    Raises:
        ConfigError: bad options, or traces of another run in the folder.
        InputError: a bad prompts file.
        ModelError: a model that cannot be loaded or paired.
        Interrupted: by SIGINT or SIGTERM, after the current prompt; all prompts so far are committed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from beamwise.decoding.trace import TraceWriter

    prompts = read_prompts(options.prompts)
    twice = [prompt for prompt, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise InputError(f"Prompts file '{options.prompts}' has the id '{twice[0][:80]}' twice: ids are keys of rows")
    if options.limit:
        prompts = prompts[:: -(-len(prompts) // options.limit)]
    settings = {name: value for name, value in asdict(options).items() if name not in _RESUMABLE}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        _executor(options) as decode,
        TraceWriter(options.out, options.run, settings, options.prompts_per_shard) as writer,
        Progress(*columns, console=Console(stderr=True)) as progress,
        _Tracker(options) as tracker,
        StopRequests() as stop,
    ):
        task = progress.add_task("prompts", total=len(prompts))
        done, rows = writer.done_prompts(), writer.rows
        todo = [(index, prompt) for index, prompt in enumerate(prompts) if prompt.id not in done]
        progress.advance(task, len(prompts) - len(todo))
        with closing(decode(todo)) as decoded:
            for traces in decoded:
                writer.add_tables(traces.prompt, traces.layers, traces.blocks)
                rows += traces.layers.num_rows
                tracker.log(traces.index, rows, traces.blocks)
                progress.update(task, advance=1, description=f"{rows} layer rows, prompts")
                if stop.signum is not None:
                    break
    if stop.signum is not None:
        count = len(writer.done_prompts())
        where = f"stopped after {count} of {len(prompts)} prompts, all in '{options.out}'"
        raise Interrupted(stop.signum, f"{where}: give the same command again to continue")
    return Path(options.out)


def _executor(options: CollectOptions) -> AbstractContextManager[Callable[[Todo], Generator[Decoded]]]:
    if options.executor == "process":
        return process_executor(options)
    from .collect_ray import ray_executor

    return ray_executor(options)


class _Tracker:
    """Progress in wandb, where it is wanted."""

    def __init__(self, options: CollectOptions) -> None:
        self._options = options
        self._run: Any = None

    def __enter__(self) -> _Tracker:
        if self._options.wandb:
            import wandb

            from beamwise.train.tracking import wandb_mode

            mode: Any = wandb_mode()
            folder = str(Path(self._options.out))
            self._run = wandb.init(project="beamwise-collect", dir=folder, mode=mode, config=asdict(self._options))
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._run.finish()

    def log(self, index: int, rows: int, blocks: pa.Table) -> None:
        """One prompt is done."""
        if self._run is not None:
            layers = blocks["layers"].to_numpy()
            self._run.log({"prompt": index, "layer_rows": rows, "mean_acceptance_length": float(layers.mean())})
