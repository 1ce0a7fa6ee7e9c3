"""Rows of a benchmark and what is said of them: memory, medians, bootstrap intervals of paired ratios."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

_RESAMPLES = 2000


@dataclass
class Row:
    """One prompt decoded by one method under one setting.

    Attributes:
        setting: its name.
        num_beams: W.
        do_sample: sampling or greedy.
        dtype: of the models.
        device: of the models.
        method: its name.
        exact: the text is due to be that of Beamwise's target alone.
        source: file of the prompt, without its ending.
        category: of the prompt.
        prompt: its id.
        prompt_tokens: its length.
        turn: place among the methods that decoded this prompt.
        seconds: wall clock of the whole call.
        positions: by which the search advanced; all beams together count once.
        new_tokens: of the returned text, EOS included.
        target_forwards: of the target.
        draft_forwards: of the draft.
        widths: beams asked for, summed over the positions.
        drafted_nodes: nodes proposed.
        target_tokens: tokens computed by the target, where that is counted.
        peak_slots: most KV slots of the target in use.
        kv_bytes: bytes of these.
        peak_bytes: most memory in use: of the process on a CPU (resident), of the allocator on a GPU.
        draft_s: seconds in the draft, where they were clocked.
        target_s: seconds in the target's forwards, where they were clocked.
        energy_j: joules, where they were measured.
        tokens: the returned text's.
        text: the same as text.
        cells: [layer, width, reached, covered] of drafted layers.
        log_likelihood: mean per token under the float32 target without warping, nats.
        number_correct: GSM8K's final number.
        exact_match: SQuAD's.
        f1: SQuAD's.
        identical: the text is that of Beamwise's target alone, where it is due to be.
    """

    setting: str
    num_beams: int
    do_sample: bool
    dtype: str
    device: str
    method: str
    exact: bool
    source: str
    category: str
    prompt: str
    prompt_tokens: int
    turn: int
    seconds: float
    positions: int
    new_tokens: int
    target_forwards: int
    draft_forwards: int
    widths: int
    drafted_nodes: int
    target_tokens: int
    peak_slots: int
    kv_bytes: int
    peak_bytes: int | None
    draft_s: float | None
    target_s: float | None
    energy_j: float | None
    tokens: list[int]
    text: str
    cells: list[list[int]] = field(default_factory=list)
    log_likelihood: float | None = None
    number_correct: bool | None = None
    exact_match: bool | None = None
    f1: float | None = None
    identical: bool | None = None

    @property
    def rate(self) -> float:
        """Positions per second."""
        return self.positions / self.seconds


def _arrow_type(hint: Any) -> pa.DataType:
    plain = {str: pa.string(), int: pa.int64(), bool: pa.bool_(), float: pa.float64()}
    others = {
        int | None: pa.int64(),
        float | None: pa.float64(),
        bool | None: pa.bool_(),
        list[int]: pa.list_(pa.int32()),
        list[list[int]]: pa.list_(pa.list_(pa.int32())),
    }
    return plain[hint] if hint in plain else others[hint]


SCHEMA = pa.schema([(item.name, _arrow_type(get_type_hints(Row)[item.name])) for item in fields(Row)])
"""Of results.parquet."""


class PeakMemory:
    """The most memory in use since `reset`.

    Args:
        device: a GPU's allocator is asked; on the CPU the kernel's high-water mark of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Start anew. Linux only on the CPU; elsewhere nothing is measured."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def read(self) -> int | None:
        """Bytes, or None where they cannot be told."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def slot_bytes(model: PreTrainedModel) -> int:
    """Bytes of one KV slot of a model, all layers."""
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * dim * model.dtype.itemsize


def can_measure_energy(device: torch.device) -> bool:
    """Whether joules can be read: an NVIDIA GPU, and zeus installed."""
    return device.type == "cuda" and torch.version.cuda is not None and importlib.util.find_spec("zeus") is not None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Median, and its percentile bootstrap interval (Efron 1979; 2000 resamples, seed 0)."""
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(array), size=(_RESAMPLES, len(array)))
    medians = np.median(array[draws], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(np.median(array)), float(low), float(high)


def paired_ratios(rows: Sequence[Row], baseline: Sequence[Row]) -> list[float]:
    """Positions per second over the baseline's, prompt by prompt; prompts that one of them lacks are left out."""
    rates = {(row.source, row.prompt): row.rate for row in baseline}
    return [row.rate / rates[row.source, row.prompt] for row in rows if (row.source, row.prompt) in rates]


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _share(rows: Sequence[Row], parts: Sequence[float | None]) -> float | None:
    if any(part is None for part in parts):
        return None
    return sum(part for part in parts if part is not None) / sum(row.seconds for row in rows)


def summarise(rows: Sequence[Row], baseline: Sequence[Row]) -> dict[str, Any]:
    """Figures of one method under one setting, at least one row.

    Returns:
        JSON values; None is what was not measured. Rates count positions; ``ratio`` is [median, low, high] of the
        paired ratios to the baseline, None where that was skipped.
    """
    seconds, positions = sum(row.seconds for row in rows), sum(row.positions for row in rows)
    forwards = sum(row.target_forwards for row in rows)
    ratios = paired_ratios(rows, baseline)
    target, draft = (_share(rows, [getattr(row, part) for row in rows]) for part in ("target_s", "draft_s"))
    joules = [row.energy_j for row in rows if row.energy_j is not None]
    due = [row.identical for row in rows if row.identical is not None]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return {
        "prompts": len(rows),
        "tokens_per_second": positions / seconds,
        "median_tokens_per_second": statistics.median(row.rate for row in rows),
        "text_tokens_per_second": sum(row.new_tokens for row in rows) / seconds,
        "seconds": seconds,
        "ratio": list(median_interval(ratios)) if ratios else None,
        "target_forwards_per_token": forwards / positions,
        "draft_forwards_per_token": sum(row.draft_forwards for row in rows) / positions,
        "mean_acceptance_length": positions / forwards,
        "mean_width": sum(row.widths for row in rows) / positions,
        "share_target": target,
        "share_draft": draft,
        "share_rest": None if target is None or draft is None else 1.0 - target - draft,
        "peak_slots": max(row.peak_slots for row in rows),
        "kv_bytes": max(row.kv_bytes for row in rows),
        "peak_bytes": max(peaks) if peaks else None,
        "joules_per_token": sum(joules) / positions if len(joules) == len(rows) else None,
        "log_likelihood": _mean([row.log_likelihood for row in rows]),
        "number_correct": _mean([row.number_correct for row in rows]),
        "exact_match": _mean([row.exact_match for row in rows]),
        "f1": _mean([row.f1 for row in rows]),
        "identical": [sum(due), len(due)] if due else None,
    }


def acceptance_cells(rows: Sequence[Row]) -> dict[tuple[int, int], tuple[int, int]]:
    """(layer, width) -> (times reached, times covered), summed."""
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for row in rows:
        for layer, width, reached, covered in row.cells:
            before = cells.get((layer, width), (0, 0))
            cells[layer, width] = before[0] + reached, before[1] + covered
    return cells


def mark_identical(rows: Sequence[Row], reference: Mapping[tuple[str, str, str], list[int]]) -> None:
    """Fill in `Row.identical` where the method's text is due to be the reference's.

    Args:
        rows: of any settings.
        reference: tokens by (setting, source, prompt) of Beamwise's target alone.
    """
    for row in rows:
        key = row.setting, row.source, row.prompt
        if row.exact and key in reference:
            row.identical = row.tokens == reference[key]
