"""The measuring: prompt by prompt all methods, in rotating order; kept as it goes, so that a run can be continued.

The folder of a run holds ``config.json`` (what was asked), ``parts/SETTING.parquet`` (the rows of a setting, rewritten
after every prompt) and, at the end, what `report` makes of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from beamwise.commands.decode import check_lengths
from beamwise.commands.loading import Models
from beamwise.decoding.errors import ConfigError, FormatError
from beamwise.decoding.prompts import Prompt, encode_prompt
from beamwise.decoding.safe_files import read_json

from .answers import answer_scores, mean_log_likelihoods
from .methods import TARGET_ONLY, Decoder, Method
from .metrics import SCHEMA, PeakMemory, Row, can_measure_energy, mark_identical, slot_bytes
from .runners import Meter, energy_meter
from .settings import MethodOptions, Output, Setting, UnavailableError

CONFIG = "config.json"
Load = Callable[[str, str], Models]
"""(dtype, device) -> models."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt and the file it is from, without its ending."""

    prompt: Prompt
    source: str

    @property
    def key(self) -> tuple[str, str]:
        """Unique in a run."""
        return self.source, self.prompt.id


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        settings: points of the grid, those of the same dtype and device next to each other.
        methods: that are compared.
        prompts: that all of them decode.
        options: of the methods.
    """

    settings: Sequence[Setting]
    methods: Sequence[Method]
    prompts: Sequence[BenchPrompt]
    options: MethodOptions


@dataclass
class Part:
    """What is known of one setting: its rows, and the methods that could not run, with the reason."""

    rows: list[Row]
    skipped: dict[str, str]

    def save(self, path: Path) -> None:
        """Write Parquet, under its name only when it is complete."""
        columns = {name: [getattr(row, name) for row in self.rows] for name in SCHEMA.names}
        metadata = {"beamwise.skipped": json.dumps(self.skipped)}
        scratch = path.with_name(f".{path.name}.writing")
        pq.write_table(pa.table(columns, schema=SCHEMA.with_metadata(metadata)), scratch, compression="zstd")
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> Part:
        """Read what `save` wrote.

        Raises:
            FormatError: damaged, or of other columns.
        """
        try:
            table = pq.read_table(path)
            skipped = json.loads((table.schema.metadata or {}).get(b"beamwise.skipped", b"{}"))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise FormatError(f"'{path}' cannot be read as results: {error}; give another folder") from error
        if table.schema.names != SCHEMA.names:
            raise FormatError(f"'{path}' has other columns than this Beamwise writes: give another folder")
        names = [item.name for item in fields(Row)]
        return cls([Row(**{name: record[name] for name in names}) for record in table.to_pylist()], skipped)


def open_folder(folder: Path, asked: dict[str, Any]) -> None:
    """Make the folder of a run, or make sure that it is this run's.

    Args:
        folder: of the run.
        asked: JSON values that two runs must share to be one.

    Raises:
        ConfigError: another run's folder, or a folder of something else.
    """
    if (folder / CONFIG).exists():
        try:
            found = read_json(folder, CONFIG)
        except (OSError, ValueError) as error:
            raise FormatError(f"'{folder}/{CONFIG}' cannot be read: {error}; give another --out") from error
        if not isinstance(found, dict):
            raise FormatError(f"'{folder}/{CONFIG}' is not a benchmark's: give another --out")
        other = sorted(key for key in {*asked, *found} if asked.get(key) != found.get(key))
        if other:
            raise ConfigError(f"'{folder}' holds a benchmark with other {', '.join(other)}: give another --out")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}' is no folder of a benchmark and not empty: give another --out")
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{CONFIG}.writing"
    scratch.write_text(json.dumps(asked, indent=2) + "\n")
    scratch.replace(folder / CONFIG)


def run_plan(
    plan: Plan, folder: Path, load: Load, on_progress: Callable[[Setting, int, int], None] | None = None
) -> dict[str, Part]:
    """Measure what is missing.

    Args:
        plan: what to measure.
        folder: from `open_folder`.
        load: loads models; asked once per dtype and device, and only where something is missing.
        on_progress: called after every prompt with (setting, prompts done of it, positions decoded for it just now).

    Returns:
        By setting's name what was measured now and before.

    Raises:
        BeamwiseError: bad input.
    """
    parts: dict[str, Part] = {}
    (folder / "parts").mkdir(exist_ok=True)
    for (dtype, device), group in groupby(plan.settings, key=lambda setting: (setting.dtype, setting.device)):
        models: Models | None = None
        for setting in group:
            path = folder / "parts" / f"{setting.slug}.parquet"
            part = Part.load(path) if path.exists() else Part([], {})
            parts[setting.name] = part
            if len({(row.source, row.prompt) for row in part.rows}) < len(plan.prompts):
                models = load(dtype, device) if models is None else models
                _run_setting(plan, setting, models, part, path, on_progress)
    return parts


def _run_setting(
    plan: Plan,
    setting: Setting,
    models: Models,
    part: Part,
    path: Path,
    on_progress: Callable[[Setting, int, int], None] | None,
) -> None:
    """Decode the prompts that a part lacks."""
    tokens = [encode_prompt(models.tokenizer, one.prompt.text) for one in plan.prompts]
    check_lengths(models, [one.prompt for one in plan.prompts], tokens, plan.options.max_new_tokens)
    decoders: dict[str, tuple[Method, Decoder]] = {}
    part.skipped = {}
    for method in plan.methods:
        try:
            decoders[method.name] = method, method.make(models, setting, plan.options)
        except UnavailableError as reason:
            part.skipped[method.name] = str(reason)
    device = models.target.device
    memory, energy = PeakMemory(device), energy_meter() if can_measure_energy(device) else None
    shortest = min(tokens, key=len)
    for _, decoder in decoders.values():  # apart from what is measured: buffers, kernels, checks of the model
        decoder.prepare(shortest)
        decoder.decode(shortest)
    done = {(row.source, row.prompt) for row in part.rows}
    for number, (prompt, ids) in enumerate(zip(plan.prompts, tokens, strict=True)):
        if prompt.key in done:
            continue
        shift = number % max(len(decoders), 1)
        order = [*decoders.values()][shift:] + [*decoders.values()][:shift]
        fresh = [
            _measure(setting, method, decoder, prompt, ids, turn, models, memory, energy)
            for turn, (method, decoder) in enumerate(order)
        ]
        part.rows += fresh
        part.save(path)
        done.add(prompt.key)
        if on_progress is not None:
            on_progress(setting, len(done), sum(row.positions for row in fresh))


def _measure(
    setting: Setting,
    method: Method,
    decoder: Decoder,
    prompt: BenchPrompt,
    ids: list[int],
    turn: int,
    models: Models,
    memory: PeakMemory,
    energy: Meter | None,
) -> Row:
    """Decode one prompt by the clock."""
    decoder.prepare(ids)
    outputs: list[Output] = []
    joules = None
    memory.reset()
    start = time.perf_counter()
    if energy is None:
        outputs.append(decoder.decode(ids))
    else:
        joules = energy(lambda: outputs.append(decoder.decode(ids)))
    seconds = time.perf_counter() - start
    output, new = outputs[0], outputs[0].sequences[0]
    stats, clocked = output.stats, bool(output.seconds)
    text = str(models.tokenizer.decode(new, skip_special_tokens=True))
    return Row(
        setting=setting.name,
        num_beams=setting.num_beams,
        do_sample=setting.do_sample,
        dtype=setting.dtype,
        device=setting.device,
        method=method.name,
        exact=method.is_exact(setting),
        source=prompt.source,
        category=str(prompt.prompt.record.get("category", prompt.source)),
        prompt=prompt.prompt.id,
        prompt_tokens=len(ids),
        turn=turn,
        seconds=seconds,
        positions=stats.layers,
        new_tokens=len(new),
        target_forwards=stats.target_forwards,
        draft_forwards=stats.draft_forwards,
        widths=stats.widths,
        drafted_nodes=stats.drafted_nodes,
        target_tokens=stats.target_tokens,
        peak_slots=stats.peak_slots,
        kv_bytes=stats.peak_slots * slot_bytes(models.target),
        peak_bytes=memory.read(),
        draft_s=output.seconds.get("draft", 0.0) if clocked else None,
        target_s=output.seconds.get("target", 0.0) if clocked else None,
        energy_j=joules,
        tokens=new,
        text=text,
        cells=output.cells,
        **answer_scores(text, prompt.prompt.record),  # type: ignore[arg-type]
    )


def judge(parts: dict[str, Part], prompts: Sequence[BenchPrompt], load: Load, device: str) -> list[Row]:
    """What is found out once the clock has stopped: likelihoods under the float32 target, identical texts.

    Args:
        parts: from `run_plan`.
        prompts: the plan's.
        load: the plan's.
        device: to score on.

    Returns:
        All rows.
    """
    rows = [row for part in parts.values() for row in part.rows]
    reference = {
        (row.setting, row.source, row.prompt): row.tokens for row in rows if row.method == TARGET_ONLY and row.exact
    }
    mark_identical(rows, reference)
    models = load("float32", device)
    tokens = {one.key: encode_prompt(models.tokenizer, one.prompt.text) for one in prompts}
    wanted = sorted({(row.source, row.prompt, tuple(row.tokens)) for row in rows if row.tokens})
    scores = mean_log_likelihoods(models.target, [(tokens[key[0], key[1]], key[2]) for key in wanted])
    known = dict(zip(wanted, scores, strict=True))
    for row in rows:
        row.log_likelihood = known.get((row.source, row.prompt, tuple(row.tokens)))
    return rows
